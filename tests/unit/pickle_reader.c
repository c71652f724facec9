/* Owns the reading of pickles in tests. Opcodes are those of Python's Lib/pickle.py.
 * Must not know what they hold. */
#include "unit/pickle_reader.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

enum { STACK = 128, MEMO = 1024 };

struct reader {
    const unsigned char *at, *end;
    struct pickle_value *stack[STACK];
    size_t depth;
    size_t marks[STACK];
    size_t event_count;
    struct pickle_value *memo[MEMO];
};

static struct pickle_value *newest;

static struct pickle_value *make(enum pickle_kind kind)
{
    struct pickle_value *value = calloc(1, sizeof *value);
    cr_assert_not_null(value);
    value->kind = kind;
    value->made_before = newest;
    newest = value;
    return value;
}

void pickle_free(void)
{
    while (newest) {
        struct pickle_value *value = newest;
        newest = value->made_before;
        free(value->text);
        free(value->items);
        free(value);
    }
}

static const unsigned char *take(struct reader *r, size_t size)
{
    cr_assert_leq(size, (size_t)(r->end - r->at), "the pickle ends too early");
    const unsigned char *from = r->at;
    r->at += size;
    return from;
}

/* The lowest byte comes first. */
static uint64_t take_number(struct reader *r, size_t size)
{
    const unsigned char *from = take(r, size);
    uint64_t number = 0;
    for (size_t i = 0; i < size; i++)
        number |= (uint64_t)from[i] << 8 * i;
    return number;
}

static void push(struct reader *r, struct pickle_value *value)
{
    cr_assert_lt(r->depth, STACK);
    r->stack[r->depth++] = value;
}

static struct pickle_value *pop(struct reader *r)
{
    cr_assert_gt(r->depth, r->event_count ? r->marks[r->event_count - 1] : 0);
    return r->stack[--r->depth];
}

static void push_integer(struct reader *r, int64_t number)
{
    struct pickle_value *value = make(PICKLE_INTEGER);
    value->number = number;
    push(r, value);
}

static void read_long(struct reader *r)
{
    const size_t size = (size_t)take_number(r, 1);
    cr_assert(size >= 1 && size <= 9, "an integer of %zu bytes", size);
    uint64_t number = take_number(r, size < 8 ? size : 8);
    if (size < 8 && number >> (8 * size - 1))
        number |= ~UINT64_C(0) << 8 * size; /* a negative one */
    int64_t value;
    memcpy(&value, &number, sizeof value);
    push_integer(r, value);
    if (size == 9) {
        cr_assert_eq(take_number(r, 1), 0, "more than 64 bits");
        r->stack[r->depth - 1]->is_huge = value < 0;
    }
}

static void read_float(struct reader *r)
{
    const unsigned char *from = take(r, 8);
    uint64_t bits = 0;
    for (int i = 0; i < 8; i++)
        bits = bits << 8 | from[i];
    struct pickle_value *value = make(PICKLE_FLOAT);
    memcpy(&value->real, &bits, sizeof bits);
    push(r, value);
}

static void read_text(struct reader *r)
{
    const size_t size = (size_t)take_number(r, 4);
    const unsigned char *from = take(r, size);
    struct pickle_value *value = make(PICKLE_TEXT);
    value->text = malloc(size + 1);
    cr_assert_not_null(value->text);
    memcpy(value->text, from, size);
    value->text[size] = '\0';
    push(r, value);
}

static void add_item(struct pickle_value *to, struct pickle_value *item)
{
    if (to->count == to->room) {
        to->room = to->room ? 2 * to->room : 8;
        to->items = realloc(to->items, to->room * sizeof(struct pickle_value *));
        cr_assert_not_null(to->items);
    }
    to->items[to->count++] = item;
}

static void set_items(struct reader *r)
{
    cr_assert_gt(r->event_count, 0);
    const size_t mark = r->marks[--r->event_count];
    cr_assert(mark > 0 && (r->depth - mark) % 2 == 0, "a key without a value");
    struct pickle_value *dict = r->stack[mark - 1];
    cr_assert_eq(dict->kind, PICKLE_DICT);
    for (size_t i = mark; i < r->depth; i++) {
        cr_assert((i - mark) % 2 || r->stack[i]->kind == PICKLE_TEXT, "a key that is no text");
        add_item(dict, r->stack[i]);
    }
    r->depth = mark;
}

static void append(struct reader *r)
{
    struct pickle_value *item = pop(r);
    cr_assert_gt(r->depth, 0);
    cr_assert_eq(r->stack[r->depth - 1]->kind, PICKLE_LIST);
    add_item(r->stack[r->depth - 1], item);
}

static void make_pair(struct reader *r)
{
    struct pickle_value *pair = make(PICKLE_LIST);
    struct pickle_value *second = pop(r);
    pair->is_tuple = true;
    add_item(pair, pop(r));
    add_item(pair, second);
    push(r, pair);
}

static void keep(struct reader *r, size_t size)
{
    const uint64_t number = take_number(r, size);
    cr_assert(number < MEMO && r->depth > 0 && !r->memo[number], "kept twice, or nothing");
    r->memo[number] = r->stack[r->depth - 1];
}

static void give_again(struct reader *r, size_t size)
{
    const uint64_t number = take_number(r, size);
    cr_assert(number < MEMO && r->memo[number], "nothing was kept under %ju", (uintmax_t)number);
    push(r, r->memo[number]);
}

/* False at the end. */
static bool step(struct reader *r)
{
    const unsigned opcode = take(r, 1)[0];
    switch (opcode) {
    case '(':
        cr_assert_lt(r->event_count, STACK);
        r->marks[r->event_count++] = r->depth;
        break;
    case '}':
    case ']':
        push(r, make(opcode == '}' ? PICKLE_DICT : PICKLE_LIST));
        break;
    case 'u':
        set_items(r);
        break;
    case 'a':
        append(r);
        break;
    case 'K':
        push_integer(r, (int64_t)take_number(r, 1));
        break;
    case 'M':
        push_integer(r, (int64_t)take_number(r, 2));
        break;
    case 'J':
        push_integer(r, (int32_t)take_number(r, 4));
        break;
    case 0x8a:
        read_long(r);
        break;
    case 'G':
        read_float(r);
        break;
    case 'X':
        read_text(r);
        break;
    case 0x88:
    case 0x89:
        push(r, make(PICKLE_BOOL));
        r->stack[r->depth - 1]->number = opcode == 0x88;
        break;
    case 'N':
        push(r, make(PICKLE_NONE));
        break;
    case 0x86:
        make_pair(r);
        break;
    case 'q':
        keep(r, 1);
        break;
    case 'r':
        keep(r, 4);
        break;
    case 'h':
        give_again(r, 1);
        break;
    case 'j':
        give_again(r, 4);
        break;
    case '.':
        return false;
    default:
        cr_assert_fail("opcode 0x%02x: the viewer does not know it, or this reader", opcode);
    }
    return true;
}

struct pickle_value *pickle_read(const unsigned char *bytes, size_t size)
{
    struct reader r = {.at = bytes, .end = bytes + size};
    cr_assert(take(&r, 1)[0] == 0x80 && take(&r, 1)[0] == 2, "not protocol 2");
    while (step(&r))
        continue;
    cr_assert(r.at == r.end, "%zu bytes behind the end", (size_t)(r.end - r.at));
    cr_assert(r.depth == 1 && r.event_count == 0, "%zu values", r.depth);
    return r.stack[0];
}

const struct pickle_value *pickle_get(const struct pickle_value *dict, const char *key)
{
    cr_assert_eq(dict->kind, PICKLE_DICT);
    for (size_t i = 0; i < dict->count; i += 2)
        if (strcmp(dict->items[i]->text, key) == 0)
            return dict->items[i + 1];
    cr_assert_fail("there is no \"%s\"", key);
    return NULL;
}

static const struct pickle_value *get_kind(const struct pickle_value *dict, const char *key,
                                           enum pickle_kind kind)
{
    const struct pickle_value *value = pickle_get(dict, key);
    cr_assert_eq(value->kind, kind, "\"%s\" is of kind %d", key, (int)value->kind);
    return value;
}

int64_t pickle_number(const struct pickle_value *dict, const char *key)
{
    const struct pickle_value *value = get_kind(dict, key, PICKLE_INTEGER);
    cr_assert_not(value->is_huge);
    return value->number;
}

const char *pickle_text(const struct pickle_value *dict, const char *key)
{
    return get_kind(dict, key, PICKLE_TEXT)->text;
}

const struct pickle_value *pickle_list(const struct pickle_value *dict, const char *key)
{
    return get_kind(dict, key, PICKLE_LIST);
}
