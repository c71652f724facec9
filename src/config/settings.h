/* The one table of settings, and what the files of this folder share.
 * Must not know what a setting does. */
#ifndef RBI_SETTINGS_H
#define RBI_SETTINGS_H

#include "base/base.h"
#include "rebatch/config.h"

/* ---- the table ---- */

/* X(name, what it is about), in the order of every listing. */
#define RBI_GROUPS(X)                                                                              \
    X(batch, "How the effective batch is cut into micro-batches. Sizes are in samples.")           \
    X(memory, "What the pool may take from the device.")                                           \
    X(recovery, "What happens when memory runs out.")                                              \
    X(growth, "How the micro-batch grows again.")                                                  \
    X(probe, "How the largest micro-batch is found.")                                              \
    X(device, "Which device is used.")                                                             \
    X(log, "Which events are reported, and where.")

enum rbi_setting_kind {
    RBI_COUNT,  /* a whole number from `least` to `most` */
    RBI_SIZE,   /* bytes from `least` to `most`; as a number, or as text with a unit */
    RBI_SHARE,  /* a share of `share_of`, as text: "80%" */
    RBI_SWITCH, /* true or false */
    RBI_CHOICE, /* one of `choices`, as text; its number is the index */
    RBI_TEXT,   /* up to `most` bytes, no quotes, backslashes or control characters */
    RBI_LIST    /* whole numbers from `least` to `most`, as an array, or "any" */
};

/* Sizes and counts above this would not survive libconfig's 64-bit integers. */
#define RBI_NUMBER_MOST INT64_MAX

/* X(id, members of struct rbi_setting), in the order of every listing. Everything that is known
 * about settings is made from this: parser, types, defaults, ranges, variables, documents,
 * example file. */
#define RBI_SETTINGS(X)                                                                            \
    X(BATCH_START, .key = "batch.start", .kind = RBI_COUNT, .initial = "0",                        \
      .most = RBI_NUMBER_MOST, .help = "First micro-batch size. 0: the effective batch.")          \
    X(BATCH_LEARN, .key = "batch.learn", .kind = RBI_SWITCH, .initial = "false",                   \
      .help = "Start with the smallest micro-batch, and learn from the first ones how large "      \
              "they can be. Needs batch.start 0.")                                                 \
    X(BATCH_SMALLEST, .key = "batch.smallest", .kind = RBI_COUNT, .initial = "1", .least = 1,      \
      .most = RBI_NUMBER_MOST, .help = "Smallest micro-batch size.")                               \
    X(BATCH_LARGEST, .key = "batch.largest", .kind = RBI_COUNT, .initial = "0",                    \
      .most = RBI_NUMBER_MOST, .help = "Largest micro-batch size. 0: the effective batch.")        \
    X(BATCH_MULTIPLE_OF, .key = "batch.multiple_of", .kind = RBI_COUNT, .initial = "1",            \
      .least = 1, .most = RBI_NUMBER_MOST,                                                         \
      .help = "Micro-batch sizes are multiples of this. The last micro-batch of an effective "     \
              "batch may be smaller.")                                                             \
    X(BATCH_ALLOWED, .key = "batch.allowed", .kind = RBI_LIST, .initial = "any", .least = 1,       \
      .most = RBI_NUMBER_MOST,                                                                     \
      .help = "Allowed micro-batch sizes. The last micro-batch of an effective batch may be "      \
              "smaller.")                                                                          \
    X(MEMORY_LIMIT, .key = "memory.limit", .kind = RBI_SIZE, .initial = "none", .least = 1,        \
      .most = RBI_NUMBER_MOST, .share_of = "the device's memory", .may_be_none = true,             \
      .help = "The most device memory that the pool may hold.")                                    \
    X(MEMORY_HEADROOM, .key = "memory.headroom", .kind = RBI_SIZE, .initial = "0",                 \
      .most = RBI_NUMBER_MOST,                                                                     \
      .help = "Memory left free on the device, for libraries and the driver.")                     \
    X(MEMORY_FLOOR, .key = "memory.floor", .kind = RBI_SIZE, .initial = "0",                       \
      .most = RBI_NUMBER_MOST,                                                                     \
      .help = "Memory that the pool reserves at once and does not give back, so that nobody "      \
              "else takes it between two phases.")                                                 \
    X(MEMORY_CACHING, .key = "memory.caching", .kind = RBI_SWITCH, .initial = "true",              \
      .help = "Keep freed memory for later requests. false: every call goes to the device, "       \
              "for memory checkers.")                                                              \
    X(MEMORY_REPLAY, .key = "memory.replay", .kind = RBI_SWITCH, .initial = "true",                \
      .help = "Where pages would be remapped in every repetition of a phase, or memory be held "   \
              "that is not in use, place its allocations by a plan. false: never.")                \
    X(MEMORY_OVERFLOW, .key = "memory.overflow", .kind = RBI_SWITCH, .initial = "true",            \
      .help = "Take host memory for an update that has begun to change parameters when the "       \
              "device has no more. false: the step ends with an error, and some parameters are "   \
              "new.")                                                                              \
    X(MEMORY_OVERFLOW_LIMIT, .key = "memory.overflow_limit", .kind = RBI_SIZE, .initial = "0",     \
      .most = RBI_NUMBER_MOST,                                                                     \
      .help = "The most host memory that is taken then; never more than half of what the host "    \
              "has free. 0: that half.")                                                           \
    X(MEMORY_KEEP_ROOM, .key = "memory.keep_room", .kind = RBI_SHARE, .initial = "2%",             \
      .share_of = "the memory that the pool holds or can get",                                     \
      .help =                                                                                      \
          "When live memory has not risen for a while, the pool takes new memory instead "         \
          "of remapping free pages, while more than this share stays free. 100%: always remap.")   \
    X(MEMORY_ROUNDING, .key = "memory.rounding", .kind = RBI_COUNT, .initial = "0", .most = 256,   \
      .is_power_of_two = true,                                                                     \
      .help = "Block sizes are rounded up to one of this many steps between two powers of "        \
              "two. 0: to 512 bytes only.")                                                        \
    X(MEMORY_EVENTS, .key = "memory.events", .kind = RBI_COUNT, .initial = "0",                    \
      .most = UINT32_MAX,                                                                          \
      .help = "How many of the latest allocations, frees, mappings, OOMs and rollbacks are "       \
              "kept for snapshots.")                                                               \
    X(MEMORY_YIELD, .key = "memory.yield", .variable = "REBATCH_YIELD", .kind = RBI_TEXT,          \
      .initial = "none", .most = 600, .may_be_none = true,                                         \
      .help = "Socket by which others ask for memory: a path, a folder of such sockets, or 1 for " \
              "the folder that `rebatch top` lists. 0: none.")                                     \
    X(RECOVERY_ON_OOM, .key = "recovery.on_oom", .kind = RBI_CHOICE, .initial = "auto",            \
      .choices = {"auto", "halve", "fit", "stop"},                                                 \
      .help =                                                                                      \
          "After an OOM, try half of the micro-batch that failed, or the largest size "            \
          "that is predicted to fit (half if nothing is known), or end the step with an error. "   \
          "auto: fit after a probe or learn, else halve.")                                         \
    X(RECOVERY_ADMISSION, .key = "recovery.admission", .kind = RBI_SWITCH, .initial = "true",      \
      .help = "Do not start a micro-batch whose memory is known not to be available.")             \
    X(RECOVERY_LIGHTEN, .key = "recovery.lighten", .kind = RBI_SWITCH, .initial = "true",          \
      .help = "When the smallest micro-batch does not fit, make the step use less memory for "     \
              "each sample, if it can.")                                                           \
    X(RECOVERY_MAX_ATTEMPTS, .key = "recovery.max_attempts", .kind = RBI_COUNT, .initial = "64",   \
      .least = 1, .most = 65536,                                                                   \
      .help = "Most failed attempts in one step, those that are not started included, before "     \
              "it ends with an error.")                                                            \
    X(RECOVERY_MAX_OOMS_IN_ROW, .key = "recovery.max_ooms_in_row", .kind = RBI_COUNT,              \
      .initial = "0", .most = 65536,                                                               \
      .help = "Most OOMs in one step, without a micro-batch that succeeds between them, "          \
              "before it ends with an error. 0: only recovery.max_attempts applies.")              \
    X(RECOVERY_OOM_WAIT_MS, .key = "recovery.oom_wait_ms", .kind = RBI_COUNT, .initial = "10000",  \
      .least = 1, .most = 3600000,                                                                 \
      .help = "Longest wait in one step, in milliseconds, for memory that others hold, before "    \
              "it ends with an error.")                                                            \
    X(GROWTH_ENABLED, .key = "growth.enabled", .kind = RBI_SWITCH, .initial = "true",              \
      .help = "Grow the micro-batch again after steps without an OOM.")                            \
    X(GROWTH_AFTER, .key = "growth.after", .kind = RBI_COUNT, .initial = "16", .least = 1,         \
      .most = UINT32_MAX, .help = "Steps without an OOM before the micro-batch grows.")            \
    X(GROWTH_WAIT_MAX, .key = "growth.wait_max", .kind = RBI_COUNT, .initial = "1024", .least = 1, \
      .most = UINT32_MAX, .help = "A failed growth doubles that wait, up to this many steps.")     \
    X(PROBE_MAX_TRIALS, .key = "probe.max_trials", .kind = RBI_COUNT, .initial = "0",              \
      .most = UINT32_MAX,                                                                          \
      .help = "Most micro-batches that a probe runs. 0: 5, and 8 more to measure which size "      \
              "is fastest.")                                                                       \
    X(PROBE_MAX_SECONDS, .key = "probe.max_seconds", .kind = RBI_COUNT, .initial = "0",            \
      .most = UINT32_MAX,                                                                          \
      .help = "No trial starts later than this many seconds after the probe began. 0: no "         \
              "bound.")                                                                            \
    X(PROBE_CHOOSE, .key = "probe.choose", .kind = RBI_CHOICE, .initial = "largest",               \
      .choices = {"largest", "fastest"},                                                           \
      .help = "The largest micro-batch that fits, or the smallest within 2 % of the best "         \
              "throughput.")                                                                       \
    X(PROBE_FILE, .key = "probe.file", .kind = RBI_TEXT, .initial = "none", .most = 600,           \
      .may_be_none = true,                                                                         \
      .help = "File that keeps results: a resumed training verifies the size in it instead of "    \
              "searching.")                                                                        \
    X(PROBE_KEY, .key = "probe.key", .kind = RBI_TEXT, .initial = "none", .most = 255,             \
      .may_be_none = true,                                                                         \
      .help = "Name of the model in that file. none: the program's own name for it.")              \
    X(DEVICE_KIND, .key = "device.kind", .kind = RBI_CHOICE, .initial = "host",                    \
      .choices = {"host", "cuda", "auto"},                                                         \
      .help = "The device: an NVIDIA GPU, or CPU memory under a cap. auto: CPU memory where "      \
              "device.capacity is set or there is no GPU, else a GPU.")                            \
    X(DEVICE_ORDINAL, .key = "device.ordinal", .kind = RBI_COUNT, .initial = "0",                  \
      .most = INT32_MAX, .help = "Number of the GPU, as CUDA counts.")                             \
    X(DEVICE_CAPACITY, .key = "device.capacity", .kind = RBI_SIZE, .initial = "none",              \
      .least = 65536, .most = RBI_NUMBER_MOST, .share_of = "the machine's memory",                 \
      .may_be_none = true, .help = "Memory of the host device.")                                   \
    X(LOG_LEVEL, .key = "log.level", .kind = RBI_CHOICE, .initial = "auto",                        \
      .choices = {"auto", "quiet", "error", "warn", "info", "debug"},                              \
      .help = "Less important events are not reported. auto: warn on standard error, info in "     \
              "a file and for the program's own callback. quiet: no events.")                      \
    X(LOG_FILE, .key = "log.file", .kind = RBI_TEXT, .initial = "none", .most = 600,               \
      .may_be_none = true,                                                                         \
      .help = "File to which events are appended, instead of standard error.")                     \
    X(LOG_FORMAT, .key = "log.format", .kind = RBI_CHOICE, .initial = "text",                      \
      .choices = {"text", "json"}, .help = "Lines for people, or one JSON object a line.")
#define RBI_CHOICES_MOST 6

struct rbi_setting {
    const char *key;      /* "group.name" */
    const char *variable; /* where it is not made of the key; NULL: it is */
    enum rbi_setting_kind kind;
    const char *initial; /* the default, as it would stand in a variable */
    uint64_t least, most;
    const char *share_of; /* of what "90%" is a share; NULL: percentages are refused */
    bool may_be_none;     /* "none" is a value */
    bool is_power_of_two; /* or 0 */
    const char *choices[RBI_CHOICES_MOST + 1]; /* up to the first NULL */
    const char *help;                          /* whole sentences, in ASCII */
};

enum rbi_setting_id {
#define RBI_SETTING_ID_(id, ...) RBI_##id,
    RBI_SETTINGS(RBI_SETTING_ID_)
#undef RBI_SETTING_ID_
        RBI_SETTING_COUNT
};

/* device.kind's choices, in their order. */
enum { RBI_KIND_HOST, RBI_KIND_CUDA, RBI_KIND_AUTO };

enum {
#define RBI_GROUP_ID_(name, text) RBI_GROUP_##name,
    RBI_GROUPS(RBI_GROUP_ID_)
#undef RBI_GROUP_ID_
        RBI_GROUP_COUNT
};

struct rbi_group {
    const char *name;
    const char *help;
};

/* settings.c */
extern const struct rbi_setting rbi_settings[RBI_SETTING_COUNT];
extern const struct rbi_group rbi_groups[RBI_GROUP_COUNT];

/* Whether `setting` belongs to the group of that name. */
bool rbi_setting_is_in(const struct rbi_setting *setting, const char *group);
/* The key without its group: "limit". */
const char *rbi_setting_name(const struct rbi_setting *setting);
/* The setting of a full key; NULL: there is none. */
const struct rbi_setting *rbi_setting_find(const char *key);
/* The group of that name; NULL: there is none. */
const struct rbi_group *rbi_group_find(const char *name);

/* "REBATCH_MEMORY_LIMIT" */
#define RBI_VARIABLE_PREFIX "REBATCH_"
/* Names the file of settings. */
#define RBI_FILE_VARIABLE "REBATCH_CONFIG"
struct rbi_variable {
    char name[48];
};
struct rbi_variable rbi_setting_variable(const struct rbi_setting *setting);

/* What may stand there: 'a whole number from 1 to 4294967295', '"halve" or "stop"'. */
void rbi_setting_describe(struct rbi_text *t, const struct rbi_setting *setting);
/* Adds the names of a group's settings, or of all groups for NULL: "limit, headroom or caching". */
void rbi_setting_list(struct rbi_text *t, const char *group);

/* ---- numbers (number.c) ---- */

enum rbi_integer { RBI_INTEGER_NONE, RBI_INTEGER_FITS, RBI_INTEGER_TOO_LARGE };

/* Reads what libconfig would take for an integer, of `length` bytes: "-5", "0x40", "64L". */
enum rbi_integer rbi_integer_parse(const char *text, size_t length, int64_t *out);

/* Text such as "1.5 GiB" or "90%": what it says, rounded down, and what is wrong with it. */
struct rbi_size {
    uint64_t bytes;
    uint32_t permille; /* of a share; then `bytes` is 0 */
    char wrong[72];    /* "": nothing; else it follows the text in the error sentence */
};
struct rbi_size rbi_size_parse(const char *text, bool may_be_share);
struct rbi_size rbi_size_wrong(const char *wrong);

/* ---- values (value.c) ---- */

/* The most numbers in a list. */
#define RBI_LIST_MOST REBATCH_ALLOWED_SIZES
/* The longest value, brackets and zero byte included: a list of numbers of 19 digits. */
#define RBI_VALUE_BYTES (RBI_LIST_MOST * 21 + 3)
/* The longest text with a size, quotes and zero byte included. */
#define RBI_SIZE_BYTES 64

/* One setting's value, and where it came from. */
struct rbi_entry {
    uint64_t number; /* count, bytes, 0 or 1, index of the choice; how many in a list */
    uint64_t list[RBI_LIST_MOST]; /* by size, each once */
    uint32_t permille;            /* of a share; then `number` is 0 */
    bool is_none;                 /* then `number` is 0 */
    char text[RBI_VALUE_BYTES];   /* as it would stand in a file */
    char words[RBI_VALUE_BYTES];  /* of a text: without the quotes; "" when it is none */
    char *origin;                 /* "FILE:LINE" or a variable; NULL: the default */
};

/* Where a value stands, for error texts: a line of a file, or a variable. */
struct rbi_place {
    const char *file; /* NULL: it is a variable */
    uint32_t line;
    const char *variable;
};

/* A place, or a text that came from outside, made fit for an error sentence. */
struct rbi_shown {
    char text[160];
};
struct rbi_shown rbi_shown_place(const struct rbi_place *place);
struct rbi_shown rbi_shown_path(const char *path);
struct rbi_shown rbi_shown_text(const char *text, size_t length);

/* Each sets the value of `entry`, or answers REBATCH_E_PARSE with the entry unchanged. From a
 * file: */
rebatch_status rbi_entry_set_integer(struct rbi_entry *entry, const struct rbi_setting *setting,
                                     int64_t integer, const struct rbi_place *place);
rebatch_status rbi_entry_set_boolean(struct rbi_entry *entry, const struct rbi_setting *setting,
                                     bool boolean, const struct rbi_place *place);
rebatch_status rbi_entry_set_quoted(struct rbi_entry *entry, const struct rbi_setting *setting,
                                    const char *text, const struct rbi_place *place);
rebatch_status rbi_entry_set_list(struct rbi_entry *entry, const struct rbi_setting *setting,
                                  const int64_t *numbers, size_t count,
                                  const struct rbi_place *place);
/* From a variable, or the table: text whose type is the setting's. */
rebatch_status rbi_entry_set_bare(struct rbi_entry *entry, const struct rbi_setting *setting,
                                  const char *text, const struct rbi_place *place);
/* The level of a value of log.level. */
rebatch_log_level rbi_entry_log_level(const struct rbi_entry *entry);
/* The error for a value of a type that no setting has: `shown` is '1.5, a number with a
 * fraction'. */
rebatch_status rbi_entry_refuse(const struct rbi_setting *setting, const struct rbi_place *place,
                                const char *shown);

/* Remembers where an entry came from. REBATCH_E_HOST_OOM. */
rebatch_status rbi_entry_set_origin(struct rbi_entry *entry, const struct rbi_place *place);

/* ---- what is nearest (spelling.c) ---- */

/* The best of the candidates that were offered, if any is near. */
struct rbi_nearest {
    const char *word; /* borrowed */
    size_t length;
    size_t distance;
    const void *found; /* NULL: nothing is near */
};
struct rbi_nearest rbi_nearest_to(const char *word, size_t length);
void rbi_nearest_offer(struct rbi_nearest *nearest, const char *candidate, const void *answer);
/* The setting whose full key, or bare name, is nearest; those of `group` first, if it is not
 * NULL. */
const struct rbi_setting *rbi_nearest_setting(const char *group, const char *word, size_t length);

/* ---- what is asked for one run (run.c) ---- */

/* X(id, variable); these are no settings of a file. docs/run.md says what they do. */
#define RBI_RUN_VARIABLES(X)                                                                       \
    X(PROBE_ONLY, "REBATCH_PROBE_ONLY")                                                            \
    X(CHECK, "REBATCH_CHECK")                                                                      \
    X(OOM, "REBATCH_RUN_OOM")                                                                      \
    X(OOM_CHANCE, "REBATCH_RUN_OOM_CHANCE")                                                        \
    X(SEED, "REBATCH_RUN_SEED")                                                                    \
    X(SHRINK, "REBATCH_RUN_SHRINK")                                                                \
    X(RECORD, "REBATCH_RUN_RECORD")                                                                \
    X(REPORT, "REBATCH_REPORT_FD")

enum rbi_run_variable {
#define RUN_VARIABLE_(id, name) RBI_RUN_##id,
    RBI_RUN_VARIABLES(RUN_VARIABLE_)
#undef RUN_VARIABLE_
        RBI_RUN_VARIABLE_COUNT
};
extern const char *const rbi_run_variables[RBI_RUN_VARIABLE_COUNT];

#define RBI_SHRINKS_MOST 32

/* From a step on, the limit is this share of what it was at first. */
struct rbi_shrink {
    uint32_t permille;
    uint64_t step;
};

enum rbi_probe_form { RBI_PROBE_NONE, RBI_PROBE_TABLE, RBI_PROBE_JSON };

struct rbi_run_settings {
    enum rbi_probe_form probe; /* instead of the first step */
    bool check;                /* the same */
    uint64_t limit_bytes;      /* of the pool; 0: none */
    uint32_t limit_permille;   /* the same as a share of the device; 0: none */
    rebatch_log_level log_level;
    uint64_t oom;  /* which request of callbacks fails, from 1; 0: none */
    double chance; /* that one does; 0: none does */
    uint64_t seed;
    struct rbi_shrink shrinks[RBI_SHRINKS_MOST]; /* by step */
    size_t shrink_count;
    const char *record; /* a file for the program's allocations, of the environment; NULL: none */
    int report;         /* the socket of the `rebatch` command; -1: there is none */
};

/* Reads the environment. REBATCH_E_PARSE, with the variable and what was expected. */
rebatch_status rbi_run_settings_read(struct rbi_run_settings *run);
/* The same, and whether a variable is nearly a setting's, such as REBATCH_MEM_LIMIT. */
rebatch_status rbi_run_settings_check(void);

/* ---- files (source.c) ---- */

/* A file and what it includes, as one text that libconfig reads as it was meant. */
struct rbi_source {
    char *text; /* zero-terminated */
    size_t length, room;
    unsigned line; /* the last one of `text`, from 1 */
    struct rbi_source_part {
        unsigned first; /* line of `text` */
        uint32_t file;  /* index into `files` */
        uint32_t line;  /* of that file */
    } * parts;          /* from a line of `text` on, where lines came from */
    size_t part_count;
    char **files;
    size_t file_count;
};

/* Leaves `source` to be freed on failure too.
 * REBATCH_E_IO, REBATCH_E_PARSE, REBATCH_E_HOST_OOM. */
rebatch_status rbi_source_read(struct rbi_source *source, const char *path);
void rbi_source_free(struct rbi_source *source);
/* Where line `line`, from 1, of the text came from. */
struct rbi_place rbi_source_place(const struct rbi_source *source, unsigned line);

/* ---- the whole (config.c, program.c, settings_file.c, environment.c,
 * together.c) ---- */

struct rebatch_config {
    struct rbi_entry entries[RBI_SETTING_COUNT];
    void (*on_mistake)(const char *sentence, void *user); /* NULL: the first mistake is the end */
    void *user;
    bool has_mistake; /* and was told of it */
};

/* Tells of a mistake: where there is somebody to tell, the reading goes on. */
rebatch_status rbi_config_note(struct rebatch_config *config, rebatch_status status);

/* As rebatch_config_load(); file and environment override the settings of `program`, which are text
 * such as "batch.largest = 64; memory.limit = 2GiB". NULL: there is none; with one, device.kind is
 * "auto" by default. */
rebatch_status rbi_config_load(rebatch_config **out, const char *path, const char *program);
/* Reads as rebatch_config_load() does, and goes on behind each mistake, which `on_mistake` is told
 * as a sentence. REBATCH_E_PARSE when there was one. */
rebatch_status rbi_config_check(const char *path,
                                void (*on_mistake)(const char *sentence, void *user), void *user);
rebatch_status rbi_config_read_program(struct rebatch_config *config, const char *text);
rebatch_status rbi_config_read_file(struct rebatch_config *config, const char *path);
rebatch_status rbi_config_read_environment(struct rebatch_config *config);
/* REBATCH_E_PARSE with its text for a variable that is nearly a setting's. */
rebatch_status rbi_config_check_names(struct rebatch_config *config);
/* Overrides `options` with what a file or a variable has set, and leaves the rest. */
void rbi_config_override(rebatch_options *options, const struct rebatch_config *config);
/* What no value can be blamed for alone. REBATCH_E_PARSE. */
rebatch_status rbi_config_check_conflicts(const struct rebatch_config *config);
/* Adds an example file with every key at its default, and comments (document.c). */
void rbi_config_add_example(struct rbi_text *t);
/* For who opens the device. REBATCH_E_PARSE: a number is for a GPU, and a capacity is for none. */
rebatch_status rbi_config_check_kind(const struct rebatch_config *config);
/* What only the device can tell. REBATCH_E_INVALID. */
rebatch_status rbi_config_check_device(const struct rebatch_config *config, rebatch_device *device);

#endif
