/* Holds what sharing.h promises of memory for another process: a second process maps and reads it,
 * it stays where it is whatever the pool gives back, and either side may die. Seeds: none. */
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "unit/pool_help.h"

#define PIECES 16

static rebatch_arena *open_shared(rebatch_pool *pool)
{
    rebatch_arena *arena;
    cr_assert_eq(rebatch_arena_create_shared(&arena, pool), REBATCH_OK, "%s", rebatch_last_error());
    cr_assert_eq(rebatch_arena_open(arena, NULL), REBATCH_OK, "%s", rebatch_last_error());
    return arena;
}

static char *take_shared(rebatch_arena *arena, size_t bytes, int value)
{
    void *block;
    cr_assert_eq(rebatch_arena_alloc(&block, arena, bytes, NULL, 0), REBATCH_OK, "%s",
                 rebatch_last_error());
    return memset(block, value, bytes);
}

/* ---- two processes ---- */

struct message {
    rebatch_export_piece pieces[PIECES];
    size_t count, block; /* where a block lies */
};

static void send_export(int socket, rebatch_arena *arena, const char *block)
{
    struct message message = {.count = 0};
    const void *begin;
    cr_assert_eq(rebatch_arena_export(&begin, message.pieces, PIECES, &message.count, arena),
                 REBATCH_OK, "%s", rebatch_last_error());
    message.block = (size_t)(block - (const char *)begin);
    char control[CMSG_SPACE(PIECES * sizeof(int))] = {0};
    struct iovec data = {&message, sizeof message};
    struct msghdr header = {.msg_iov = &data,
                            .msg_iovlen = 1,
                            .msg_control = control,
                            .msg_controllen = CMSG_SPACE(message.count * sizeof(int))};
    struct cmsghdr *const fds = CMSG_FIRSTHDR(&header);
    fds->cmsg_level = SOL_SOCKET;
    fds->cmsg_type = SCM_RIGHTS;
    fds->cmsg_len = CMSG_LEN(message.count * sizeof(int));
    for (size_t i = 0; i < message.count; i++)
        memcpy(CMSG_DATA(fds) + i * sizeof(int), &message.pieces[i].fd, sizeof(int));
    cr_assert_eq(sendmsg(socket, &header, 0), sizeof message);
    for (size_t i = 0; i < message.count; i++)
        (void)close(message.pieces[i].fd);
}

static bool receive_export(int socket, struct message *message)
{
    char control[CMSG_SPACE(PIECES * sizeof(int))];
    struct iovec data = {message, sizeof *message};
    struct msghdr header = {.msg_iov = &data,
                            .msg_iovlen = 1,
                            .msg_control = control,
                            .msg_controllen = sizeof control};
    if (recvmsg(socket, &header, 0) != sizeof *message || !CMSG_FIRSTHDR(&header))
        return false;
    for (size_t i = 0; i < message->count; i++)
        memcpy(&message->pieces[i].fd, CMSG_DATA(CMSG_FIRSTHDR(&header)) + i * sizeof(int),
               sizeof(int));
    return true;
}

/* A server of weights: maps what it is sent, answers each byte with the first one of the block, and
 * ends with it when the socket does. A "!" it writes there. */
static void serve(int socket)
{
    struct message message;
    rebatch_device *device;
    void *memory;
    if (!receive_export(socket, &message) ||
        rebatch_device_open_host(&device, PAGE, NULL) != REBATCH_OK ||
        rebatch_export_map(&memory, device, message.pieces, message.count) != REBATCH_OK)
        _exit(1);
    for (size_t i = 0; i < message.count; i++)
        (void)close(message.pieces[i].fd);
    (void)signal(SIGSEGV, SIG_DFL); /* no report of a sanitizer */
    volatile char *const weights = (char *)memory + message.block;
    char asked, first;
    while (read(socket, &asked, 1) == 1 && write(socket, &(char){weights[0]}, 1) == 1)
        if (asked == '!')
            weights[0] = asked;
    first = weights[0]; /* also after the trainer's end */
    const bool unmapped = rebatch_export_unmap(device, memory, message.pieces, message.count) == 0;
    rebatch_device_close(device);
    _exit(unmapped ? first : 1);
}

struct server {
    pid_t pid;
    int socket;
};

static struct server start_server(void)
{
    int ends[2];
    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    const pid_t pid = fork();
    if (pid == 0) {
        (void)close(ends[0]);
        serve(ends[1]);
    }
    (void)close(ends[1]);
    return (struct server){pid, ends[0]};
}

static int ask(const struct server *server)
{
    unsigned char answer = 0;
    cr_assert_eq(write(server->socket, "?", 1), 1);
    cr_assert_eq(read(server->socket, &answer, 1), 1, "the server is gone");
    return answer;
}

static int end_server(const struct server *server)
{
    int status;
    (void)close(server->socket);
    cr_assert_eq(waitpid(server->pid, &status, 0), server->pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* An update in place is seen without a copy and without another export, and no trim, limit, bound
 * or want of memory takes the pages away. */
Test(pool_export, another_process_reads_what_is_written_in_place)
{
    const struct server server = start_server();
    AUTO_RIG rig = rig_open(128, NULL);
    rebatch_arena *const arena = open_shared(rig.pool);
    (void)take_shared(arena, 100, 3);
    char *const weights = take_shared(arena, 20 * PAGE + 512, 7);
    send_export(server.socket, arena, weights);
    cr_assert_eq(ask(&server), 7);
    weights[0] = 8;
    cr_assert_eq(ask(&server), 8);
    give(rig.pool, take(rig.pool, 60 * PAGE));
    size_t released;
    cr_assert_eq(rebatch_pool_trim(rig.pool, 0, &released), REBATCH_OK);
    void *const asleep = take(rig.pool, 20 * PAGE);
    rebatch_sleep_report slept;
    cr_assert_eq(rebatch_pool_sleep(rig.pool, NULL, &slept), REBATCH_OK, "%s",
                 rebatch_last_error());
    cr_assert_eq(slept.copied_bytes, 20 * PAGE);
    weights[0] = 11;
    cr_assert_eq(ask(&server), 11);
    cr_assert_eq(rebatch_pool_wake(rig.pool), REBATCH_OK);
    give(rig.pool, asleep);
    cr_assert_eq(rebatch_pool_set_limit(rig.pool, PAGE), REBATCH_OK);
    cr_assert_eq(rebatch_pool_give(rig.pool, PAGE, NULL), REBATCH_OK);
    void *block;
    cr_assert_eq(rebatch_pool_alloc(&block, rig.pool, 60 * PAGE, NULL, 0), REBATCH_OOM);
    cr_assert_eq(rebatch_arena_lend(arena), REBATCH_E_STATE);
    weights[0] = 9;
    cr_assert_eq(ask(&server), 9);
    weights[0] = 10;
    cr_assert_eq(end_server(&server), 10);
    give(rig.pool, weights);
    rebatch_arena_destroy(arena);
}

Test(pool_export, a_reader_that_writes_ends_itself_and_changes_nothing)
{
    const struct server server = start_server();
    AUTO_RIG rig = rig_open(128, NULL);
    rebatch_arena *const arena = open_shared(rig.pool);
    char *const weights = take_shared(arena, 20 * PAGE, 7);
    send_export(server.socket, arena, weights);
    cr_assert_eq(ask(&server), 7);
    cr_assert_eq(write(server.socket, "!", 1), 1);
    cr_assert_eq(end_server(&server), -1, "a write of the reader has worked");
    cr_assert_eq(weights[0], 7);
    rebatch_arena_destroy(arena);
}

/* The pages are the arena's alone, of new memory, though the pool has free pages. */
Test(pool_export, no_piece_has_a_block_of_anybody_else)
{
    AUTO_RIG rig = rig_open(256, NULL);
    give(rig.pool, take(rig.pool, 40 * PAGE));
    rebatch_arena *const arena = open_shared(rig.pool);
    for (int i = 0; i < 40; i++) {
        (void)take_shared(arena, UNIT, i);
        void *const other = take(rig.pool, UNIT);
        cr_assert_not(rebatch_arena_has(arena, other));
    }
    rebatch_export_piece pieces[PIECES];
    const void *begin;
    size_t count;
    cr_assert_eq(rebatch_arena_export(&begin, pieces, PIECES, &count, arena), REBATCH_OK);
    cr_assert_eq(count, 1, "%zu", count);
    cr_assert_eq(pieces[0].bytes, 16 * PAGE, "%zu", pieces[0].bytes);
    cr_assert(fcntl(pieces[0].fd, F_GETFD) & FD_CLOEXEC);
    (void)close(pieces[0].fd);
    (void)take_shared(arena, 200 * PAGE, 1); /* what was free makes room */
    cr_assert_eq(rebatch_arena_export(&begin, pieces, PIECES, &count, arena), REBATCH_OK);
    for (size_t i = 0, end = 0; i < count; end = pieces[i].offset + pieces[i].bytes, i++) {
        cr_assert_eq(pieces[i].offset, end);
        (void)close(pieces[i].fd);
    }
    assert_valid(rig.pool);
    rebatch_arena_destroy(arena);
}

/* ---- deaths ---- */

Test(pool_export, a_killed_reader_changes_nothing)
{
    const struct server server = start_server();
    AUTO_RIG rig = rig_open(128, NULL);
    rebatch_arena *const arena = open_shared(rig.pool);
    char *const weights = take_shared(arena, 20 * PAGE, 7);
    send_export(server.socket, arena, weights);
    cr_assert_eq(ask(&server), 7);
    cr_assert_eq(kill(server.pid, SIGKILL), 0);
    cr_assert_eq(end_server(&server), -1);
    memset(weights, 8, 20 * PAGE);
    const struct server next = start_server();
    send_export(next.socket, arena, weights);
    cr_assert_eq(ask(&next), 8);
    cr_assert_eq(end_server(&next), 8);
    rebatch_arena_destroy(arena);
}

Test(pool_export, a_reader_goes_on_when_the_trainer_is_killed)
{
    const struct server server = start_server();
    const pid_t trainer = fork();
    if (trainer == 0) {
        struct rig rig = rig_open(128, NULL);
        rebatch_arena *const arena = open_shared(rig.pool);
        send_export(server.socket, arena, take_shared(arena, 20 * PAGE, 7));
        (void)raise(SIGKILL);
    }
    int status;
    cr_assert_eq(waitpid(trainer, &status, 0), trainer);
    cr_assert(WIFSIGNALED(status));
    cr_assert_eq(ask(&server), 7);
    cr_assert_eq(end_server(&server), 7);
}

/* ---- descriptors, and refusals ---- */

static size_t open_descriptors(void)
{
    size_t count = 0;
    DIR *const folder = opendir("/proc/self/fd");
    cr_assert_not_null(folder);
    while (readdir(folder))
        count++;
    (void)closedir(folder);
    return count;
}

static size_t exports_until_failure; /* of the device below */
static const struct rbi_device_ops *host_ops;

static rebatch_status export_or_fail(void *self, int *fd, rbi_physical physical)
{
    return exports_until_failure-- == 0 ? rbi_error(REBATCH_E_UNSUPPORTED, "no descriptor")
                                        : host_ops->export_physical(self, fd, physical);
}

/* The first export is the one that is tried when the arena is made. */
Test(pool_export, where_an_export_is_refused_no_descriptor_stays_open)
{
    static struct rbi_device_ops ops;
    AUTO_RIG rig = rig_open(256, NULL);
    host_ops = rig.device->ops;
    ops = *host_ops;
    ops.export_physical = export_or_fail;
    rig.device->ops = &ops;
    rebatch_arena *arena;
    exports_until_failure = 0;
    cr_assert_eq(rebatch_arena_create_shared(&arena, rig.pool), REBATCH_E_UNSUPPORTED);
    cr_assert_null(arena);
    exports_until_failure = SIZE_MAX;
    arena = open_shared(rig.pool);
    (void)take_shared(arena, 7 * PAGE, 1);
    (void)take_shared(arena, 31 * PAGE, 1);
    rebatch_export_piece pieces[PIECES];
    const void *begin;
    size_t count, unused;
    cr_assert_eq(rebatch_arena_export(&begin, NULL, 0, &count, arena), REBATCH_E_INVALID);
    cr_assert_gt(count, 1);
    const size_t before = open_descriptors();
    for (size_t i = 0; i < count; i++) {
        exports_until_failure = i;
        cr_assert_eq(rebatch_arena_export(&begin, pieces, PIECES, &unused, arena),
                     REBATCH_E_UNSUPPORTED);
        cr_assert_null(begin);
        cr_assert_eq(unused, 0);
    }
    exports_until_failure = SIZE_MAX;
    cr_assert_eq(rebatch_arena_export(&begin, pieces, count - 1, &unused, arena),
                 REBATCH_E_INVALID);
    cr_assert_eq(unused, count);
    cr_assert_eq(open_descriptors(), before);
    rebatch_arena_destroy(arena);
}

Test(pool_export, a_device_without_descriptors_says_so_and_the_pool_goes_on)
{
    rebatch_device *device;
    rebatch_pool *pool;
    rebatch_arena *arena;
    cr_assert_eq(rebatch_device_open_dry(&device, 64 * PAGE, PAGE), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&pool, device, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_arena_create_shared(&arena, pool), REBATCH_E_UNSUPPORTED);
    cr_assert(strstr(rebatch_last_error(), "device dry gives no file descriptors"), "%s",
              rebatch_last_error());
    give(pool, take(pool, 4 * PAGE));
    rebatch_pool_destroy(pool);
    rebatch_device_close(device);
}

Test(pool_export, a_limit_holds_for_it)
{
    AUTO_RIG rig = rig_open(256, NULL);
    cr_assert_eq(rebatch_pool_set_limit(rig.pool, 40 * PAGE), REBATCH_OK);
    rebatch_arena *const arena = open_shared(rig.pool);
    void *block, *const used = take(rig.pool, 10 * PAGE);
    cr_assert_eq(rebatch_arena_alloc(&block, arena, 31 * PAGE, NULL, 0), REBATCH_OOM);
    (void)take_shared(arena, 30 * PAGE, 1);
    give(rig.pool, used);
    (void)take_shared(arena, 10 * PAGE, 1);
    cr_assert_leq(stats_of(rig.pool).reserved_bytes, 40 * PAGE);
    rebatch_arena_destroy(arena);
}

Test(pool_export, what_a_floor_keeps_serves_it)
{
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.limit_bytes = 64 * PAGE;
    AUTO_RIG rig = rig_open(128, &options);
    cr_assert_eq(rebatch_pool_set_floor(rig.pool, 64 * PAGE), REBATCH_OK);
    rebatch_arena *const arena = open_shared(rig.pool);
    char *const block = take_shared(arena, 8 * PAGE, 1);
    assert_valid(rig.pool);
    cr_expect_eq(rig.pool->vm.floor_pages, 64);
    give(rig.pool, block);
    rebatch_arena_destroy(arena);
}

Test(pool_export, wrong_arguments_are_refused)
{
    AUTO_RIG rig = rig_open(64, NULL);
    rebatch_arena *arena;
    rebatch_export_piece piece = {0, PAGE, -1};
    const void *begin;
    void *memory;
    size_t count;
    cr_assert_eq(rebatch_arena_create(&arena, rig.pool), REBATCH_OK);
    cr_assert_eq(rebatch_arena_export(&begin, &piece, 1, &count, arena), REBATCH_E_STATE);
    cr_assert_eq(rebatch_arena_export(&begin, &piece, 1, &count, NULL), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_arena_export(NULL, &piece, 1, &count, arena), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_arena_export(&begin, NULL, 1, &count, arena), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_export_map(&memory, rig.device, &piece, 0), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_export_map(&memory, rig.device, &piece, 1), REBATCH_E_INVALID);
    cr_assert(strstr(rebatch_last_error(), "fd is -1"), "%s", rebatch_last_error());
    piece.bytes = PAGE / 2;
    cr_assert_eq(rebatch_export_map(&memory, rig.device, &piece, 1), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_export_map(NULL, rig.device, &piece, 1), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_export_unmap(rig.device, NULL, NULL, 1), REBATCH_E_INVALID);
    rebatch_arena_destroy(arena);
}

static void refuse_unmap(rebatch_device *device, char *address, const rebatch_export_piece *pieces,
                         size_t count, const char *text)
{
    rebatch_clear_error();
    cr_assert_eq(rebatch_export_unmap(device, address, pieces, count), REBATCH_E_INVALID);
    cr_assert(strstr(rebatch_last_error(), text), "%s", rebatch_last_error());
}

/* Else it would be the memory of somebody else that is unmapped. */
Test(pool_export, an_export_is_unmapped_once_and_as_it_was_mapped)
{
    AUTO_RIG rig = rig_open(64, NULL);
    rebatch_arena *const arena = open_shared(rig.pool);
    rebatch_export_piece pieces[PIECES], others[PIECES];
    const void *begin;
    void *memory;
    size_t count;
    (void)take_shared(arena, 20 * PAGE, 3);
    cr_assert_eq(rebatch_arena_export(&begin, pieces, PIECES, &count, arena), REBATCH_OK);
    cr_assert_gt(count, 1);
    cr_assert_eq(rebatch_export_map(&memory, rig.device, pieces, count), REBATCH_OK);
    memcpy(others, pieces, sizeof others);
    others[count - 1].bytes += PAGE;
    refuse_unmap(rig.device, memory, others, count, "the pieces are others than");
    refuse_unmap(rig.device, memory, pieces, count - 1, "the pieces are others than");
    refuse_unmap(rig.device, (char *)memory + PAGE, pieces, count, "where no export is mapped");
    cr_assert_eq(((volatile char *)memory)[0], 3);
    cr_assert_eq(rebatch_export_unmap(rig.device, memory, pieces, count), REBATCH_OK);
    refuse_unmap(rig.device, memory, pieces, count, "it was unmapped already");
    for (size_t i = 0; i < count; i++)
        (void)close(pieces[i].fd);
    rebatch_arena_destroy(arena);
}
