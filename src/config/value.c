/* Owns the reading of one value: types, units, ranges, the sentence when it is wrong, and where it
 * came from.
 * Must not know files or the environment. */
#include <inttypes.h>
#include <string.h>
#include <strings.h>

#include "config/settings.h"

/* ---- what error sentences show ---- */

struct rbi_shown rbi_shown_text(const char *text, size_t length)
{
    struct rbi_shown shown = {""};
    struct rbi_text t = {shown.text, sizeof shown.text, 0};
    rbi_text_add_shown(&t, text, length, 60);
    return shown;
}

struct rbi_shown rbi_shown_path(const char *path)
{
    struct rbi_shown shown = {""};
    struct rbi_text t = {shown.text, sizeof shown.text, 0};
    rbi_text_add_path(&t, path);
    return shown;
}

struct rbi_shown rbi_shown_place(const struct rbi_place *place)
{
    if (!place->file)
        return rbi_shown_text(place->variable, strlen(place->variable));
    struct rbi_shown shown = rbi_shown_path(place->file);
    struct rbi_text t = {shown.text, sizeof shown.text, strlen(shown.text)};
    rbi_text_add(&t, ":%" PRIu32, place->line);
    return shown;
}

/* What a value is, as type: 'a boolean: true or false'. */
static void add_expected(struct rbi_text *t, const struct rbi_setting *setting)
{
    if (setting->kind == RBI_SWITCH)
        rbi_text_add(t, "a boolean, ");
    else if (setting->kind == RBI_CHOICE || setting->kind == RBI_SHARE || setting->kind == RBI_TEXT)
        rbi_text_add(t, "text, ");
    rbi_setting_describe(t, setting);
}

rebatch_status rbi_entry_refuse(const struct rbi_setting *setting, const struct rbi_place *place,
                                const char *shown)
{
    char expected[256];
    struct rbi_text t = {expected, sizeof expected, 0};
    add_expected(&t, setting);
    return rbi_error(REBATCH_E_PARSE, "%s: %s is %s: expected %s", rbi_shown_place(place).text,
                     setting->key, shown, expected);
}

/* The same for text, with what is wrong about it: ", a negative number", or "". */
static rebatch_status refuse_text(const struct rbi_setting *setting, const struct rbi_place *place,
                                  const char *text, const char *wrong)
{
    char shown[sizeof(struct rbi_shown) + 64];
    struct rbi_text t = {shown, sizeof shown, 0};
    if (!place->file && (text[0] == '"' || text[0] == '\''))
        wrong = ", in quotes, which a variable goes without";
    rbi_text_add(&t, "\"%s\"%s", rbi_shown_text(text, strlen(text)).text, wrong);
    return rbi_entry_refuse(setting, place, shown);
}

/* ---- ranges ---- */

static const char negative_size[] = ", a negative size";

static const char *negative(const struct rbi_setting *setting)
{
    return setting->kind == RBI_SIZE ? negative_size : ", a negative number";
}

/* What is wrong with a number that has the right type; "" when nothing is. */
static const char *out_of_range(const struct rbi_setting *setting, uint64_t number)
{
    if (number == 0 && setting->kind == RBI_SIZE && setting->least > 0)
        return ", a size of zero";
    if (number < setting->least)
        return ", too small";
    if (number > setting->most)
        return ", too large";
    return setting->is_power_of_two && number != 0 && !rbi_is_power_of_two(number)
               ? ", not a power of two"
               : "";
}

/* ---- setting a value ---- */

static void set_number(struct rbi_entry *entry, uint64_t number)
{
    entry->number = number;
    entry->permille = 0;
    entry->is_none = false;
}

/* The value as it would stand in a file. Every caller's text fits. */
__attribute__((format(printf, 2, 3))) static void set_text(struct rbi_entry *entry,
                                                           const char *format, ...)
{
    struct rbi_text t = {entry->text, sizeof entry->text, 0};
    va_list arguments;
    va_start(arguments, format);
    rbi_text_add_v(&t, format, arguments);
    va_end(arguments);
    rbi_assert(t.length < sizeof entry->text);
}

rebatch_status rbi_entry_set_integer(struct rbi_entry *entry, const struct rbi_setting *setting,
                                     int64_t integer, const struct rbi_place *place)
{
    char shown[96];
    struct rbi_text t = {shown, sizeof shown, 0};
    rbi_text_add(&t, "%" PRId64, integer);
    if (setting->kind == RBI_LIST)
        return rbi_entry_set_list(entry, setting, &integer, 1, place);
    if (setting->kind != RBI_COUNT && setting->kind != RBI_SIZE) {
        rbi_text_add(&t, ", a whole number");
        return rbi_entry_refuse(setting, place, shown);
    }
    const char *wrong = integer < 0 ? negative(setting) : out_of_range(setting, (uint64_t)integer);
    if (wrong[0]) {
        rbi_text_add(&t, "%s", wrong);
        return rbi_entry_refuse(setting, place, shown);
    }
    set_number(entry, (uint64_t)integer);
    set_text(entry, "%" PRId64, integer);
    return REBATCH_OK;
}

rebatch_status rbi_entry_set_boolean(struct rbi_entry *entry, const struct rbi_setting *setting,
                                     bool boolean, const struct rbi_place *place)
{
    if (setting->kind != RBI_SWITCH)
        return rbi_entry_refuse(setting, place, boolean ? "true, a boolean" : "false, a boolean");
    set_number(entry, boolean);
    set_text(entry, boolean ? "true" : "false");
    return REBATCH_OK;
}

static struct rbi_size in_range(const struct rbi_setting *setting, struct rbi_size size)
{
    const char *wrong = out_of_range(setting, size.bytes);
    return wrong[0] ? rbi_size_wrong(wrong) : size;
}

static rebatch_status set_size(struct rbi_entry *entry, const struct rbi_setting *setting,
                               const char *text, const struct rbi_place *place)
{
    const bool is_none = setting->may_be_none && strcmp(text, "none") == 0;
    struct rbi_size size = {0, 0, ""};
    if (!is_none) {
        size = rbi_size_parse(text, setting->share_of != NULL);
        if (!size.wrong[0] && size.permille == 0)
            size = setting->kind == RBI_SHARE ? rbi_size_wrong(", not a share")
                                              : in_range(setting, size);
        if (!size.wrong[0] && strlen(text) + sizeof "\"\"" > RBI_SIZE_BYTES)
            size = rbi_size_wrong(", too long a text"); /* padded with zeros or blanks */
        if (size.wrong[0])
            return refuse_text(setting, place, text, size.wrong);
    }
    set_number(entry, size.bytes);
    entry->permille = size.permille;
    entry->is_none = is_none;
    set_text(entry, "\"%s\"", text);
    return REBATCH_OK;
}

static rebatch_status set_choice(struct rbi_entry *entry, const struct rbi_setting *setting,
                                 const char *text, const struct rbi_place *place)
{
    for (size_t i = 0; setting->choices[i]; i++) {
        if (strcmp(setting->choices[i], text) != 0)
            continue;
        set_number(entry, i);
        set_text(entry, "\"%s\"", text);
        return REBATCH_OK;
    }
    return refuse_text(setting, place, text, "");
}

/* What is wrong with a text; "" when nothing is. In a file it stands in quotes, and as it is. */
static const char *wrong_text(const struct rbi_setting *setting, const char *text)
{
    const size_t length = strlen(text);
    if (length > setting->most)
        return ", too long a text";
    for (size_t i = 0; i < length; i++)
        if (text[i] == '"' || text[i] == '\\' || (unsigned char)text[i] < ' ' || text[i] == 0x7f)
            return ", with a quote, a backslash or a control character";
    return length ? "" : ", nothing";
}

static rebatch_status set_words(struct rbi_entry *entry, const struct rbi_setting *setting,
                                const char *text, const struct rbi_place *place)
{
    const char *wrong = wrong_text(setting, text);
    if (wrong[0])
        return refuse_text(setting, place, text, wrong);
    set_number(entry, 0);
    entry->is_none = setting->may_be_none && strcmp(text, "none") == 0;
    rbi_assert(strlen(text) < sizeof entry->words);
    memcpy(entry->words, entry->is_none ? "" : text, entry->is_none ? 1 : strlen(text) + 1);
    set_text(entry, "\"%s\"", text);
    return REBATCH_OK;
}

/* ---- lists ---- */

/* What a source before this one has set is gone. */
static void clear_list(struct rbi_entry *entry)
{
    set_number(entry, 0);
    memset(entry->list, 0, sizeof entry->list);
}

/* Puts a number where it belongs, unless it is there. */
static void add_number(struct rbi_entry *entry, uint64_t number)
{
    rbi_assert(entry->number < RBI_LIST_MOST);
    size_t at = entry->number;
    while (at > 0 && entry->list[at - 1] > number)
        at--;
    if (at > 0 && entry->list[at - 1] == number)
        return;
    rbi_assert(at == entry->number || entry->list[at] > number);
    memmove(entry->list + at + 1, entry->list + at, (entry->number - at) * sizeof *entry->list);
    entry->list[at] = number;
    entry->number++;
}

static void set_list_text(struct rbi_entry *entry)
{
    struct rbi_text t = {entry->text, sizeof entry->text, 0};
    for (size_t i = 0; i < entry->number; i++)
        rbi_text_add(&t, "%s%" PRIu64, i ? ", " : "[", entry->list[i]);
    rbi_text_add(&t, "]");
    rbi_assert(t.length < sizeof entry->text);
}

rebatch_status rbi_entry_set_list(struct rbi_entry *entry, const struct rbi_setting *setting,
                                  const int64_t *numbers, size_t count,
                                  const struct rbi_place *place)
{
    if (count == 0)
        return rbi_entry_refuse(setting, place, "an empty list");
    if (count > RBI_LIST_MOST)
        return rbi_entry_refuse(setting, place, "a longer list");
    for (size_t i = 0; i < count; i++) {
        const char *wrong =
            numbers[i] < 0 ? negative(setting) : out_of_range(setting, (uint64_t)numbers[i]);
        if (!wrong[0])
            continue;
        char shown[96];
        struct rbi_text t = {shown, sizeof shown, 0};
        rbi_text_add(&t, "a list with %" PRId64 "%s", numbers[i], wrong);
        return rbi_entry_refuse(setting, place, shown);
    }
    clear_list(entry);
    for (size_t i = 0; i < count; i++)
        add_number(entry, (uint64_t)numbers[i]);
    set_list_text(entry);
    return REBATCH_OK;
}

/* "any", or numbers with commas between them, in brackets or not. */
static rebatch_status set_list(struct rbi_entry *entry, const struct rbi_setting *setting,
                               const char *text, const struct rbi_place *place)
{
    if (strcmp(text, "any") == 0) {
        clear_list(entry);
        set_text(entry, "\"any\"");
        return REBATCH_OK;
    }
    const size_t whole = strlen(text);
    const bool has_brackets = whole >= 2 && text[0] == '[' && text[whole - 1] == ']';
    const char *at = text + has_brackets;
    const char *end = text + whole - has_brackets;
    int64_t numbers[RBI_LIST_MOST + 1];
    for (size_t count = 0; count <= RBI_LIST_MOST; at++) {
        at += strspn(at, " ");
        const size_t length = rbi_min(strcspn(at, ", "), (size_t)(end - at));
        if (rbi_integer_parse(at, length, &numbers[count]) != RBI_INTEGER_FITS)
            return refuse_text(setting, place, text, "");
        count++;
        at += length;
        at += strspn(at, " ");
        if (at == end || count > RBI_LIST_MOST)
            return rbi_entry_set_list(entry, setting, numbers, count, place);
        if (*at != ',')
            break;
    }
    return refuse_text(setting, place, text, "");
}

rebatch_status rbi_entry_set_quoted(struct rbi_entry *entry, const struct rbi_setting *setting,
                                    const char *text, const struct rbi_place *place)
{
    if (setting->kind == RBI_SIZE || setting->kind == RBI_SHARE)
        return set_size(entry, setting, text, place);
    if (setting->kind == RBI_CHOICE)
        return set_choice(entry, setting, text, place);
    if (setting->kind == RBI_LIST)
        return set_list(entry, setting, text, place);
    if (setting->kind == RBI_TEXT)
        return set_words(entry, setting, text, place);
    return refuse_text(setting, place, text, ", text");
}

rebatch_status rebatch_config_parse_size(size_t *bytes, uint32_t *permille, const char *text)
{
    if (bytes)
        *bytes = 0;
    if (permille)
        *permille = 0;
    if (!bytes || !text)
        return rbi_error(REBATCH_E_INVALID, "%s is NULL", bytes ? "text" : "bytes");
    struct rbi_size size = {0, 0, ""};
    int64_t integer = 0;
    switch (rbi_integer_parse(text, strlen(text), &integer)) {
    case RBI_INTEGER_FITS:
        size = integer < 0 ? rbi_size_wrong(negative_size)
                           : (struct rbi_size){(uint64_t)integer, 0, ""};
        break;
    case RBI_INTEGER_TOO_LARGE:
        size = rbi_size_wrong(text[0] == '-' ? negative_size : ", too large a number");
        break;
    case RBI_INTEGER_NONE:
        size = rbi_size_parse(text, permille != NULL);
    }
    if (size.wrong[0])
        return rbi_error(REBATCH_E_PARSE,
                         "the size is \"%s\"%s: expected bytes such as 1048576 or \"22GiB\"%s",
                         rbi_shown_text(text, strlen(text)).text, size.wrong,
                         permille ? ", or a share such as \"90%\"" : "");
    *bytes = size.bytes;
    if (permille)
        *permille = size.permille;
    return REBATCH_OK;
}

rebatch_status rbi_entry_set_bare(struct rbi_entry *entry, const struct rbi_setting *setting,
                                  const char *text, const struct rbi_place *place)
{
    int64_t integer = 0;
    if (setting->kind == RBI_SWITCH) {
        const bool is_true = strcasecmp(text, "true") == 0;
        return is_true || strcasecmp(text, "false") == 0
                   ? rbi_entry_set_boolean(entry, setting, is_true, place)
                   : refuse_text(setting, place, text, "");
    }
    if (setting->kind == RBI_CHOICE)
        return set_choice(entry, setting, text, place);
    if (setting->kind == RBI_SHARE)
        return set_size(entry, setting, text, place);
    if (setting->kind == RBI_LIST)
        return set_list(entry, setting, text, place);
    if (setting->kind == RBI_TEXT)
        return set_words(entry, setting, text, place);
    switch (rbi_integer_parse(text, strlen(text), &integer)) {
    case RBI_INTEGER_FITS:
        return rbi_entry_set_integer(entry, setting, integer, place);
    case RBI_INTEGER_TOO_LARGE:
        return refuse_text(setting, place, text,
                           text[0] == '-' ? negative(setting) : ", too large a number");
    case RBI_INTEGER_NONE:
        break;
    }
    return setting->kind == RBI_SIZE ? set_size(entry, setting, text, place)
                                     : refuse_text(setting, place, text, "");
}

rebatch_status rbi_entry_set_origin(struct rbi_entry *entry, const struct rbi_place *place)
{
    const char *name = place->file ? place->file : place->variable;
    const size_t room = strlen(name) + sizeof ":4294967295";
    char *origin = rbi_heap_calloc(room, 1);
    if (!origin)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for settings");
    struct rbi_text t = {origin, room, 0};
    rbi_text_add(&t, "%s", name);
    if (place->file)
        rbi_text_add(&t, ":%" PRIu32, place->line);
    rbi_assert(t.length < room);
    rbi_heap_free(entry->origin);
    entry->origin = origin;
    return REBATCH_OK;
}

rebatch_log_level rbi_entry_log_level(const struct rbi_entry *entry)
{
    static const rebatch_log_level levels[] = {REBATCH_LOG_DEFAULT, REBATCH_LOG_QUIET,
                                               REBATCH_LOG_ERROR,   REBATCH_LOG_WARN,
                                               REBATCH_LOG_INFO,    REBATCH_LOG_DEBUG};
    rbi_assert(entry->number < sizeof levels / sizeof *levels);
    return levels[entry->number];
}

/* ---- mistakes ---- */

rebatch_status rbi_config_note(struct rebatch_config *config, rebatch_status status)
{
    if (status != REBATCH_E_PARSE || !config || !config->on_mistake)
        return status;
    config->on_mistake(rebatch_last_error(), config->user);
    config->has_mistake = true;
    return REBATCH_OK;
}
