/* Owns the running of a user's program: its start, what the library within it says, its end.
 * Must not know what it is run for. */
#include "cli/child.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "config/settings.h"

extern char **environ;

#define MESSAGE_BYTES (128 * 1024)
#define LOOK_MS 20    /* how often to look whether it has ended, where nothing says so */
#define GRACE_MS 2000 /* that a program has to end by itself, and then by SIGTERM */

struct child {
    pid_t pid;
    int socket;
    const struct rbi_child_listener *listener;
    bool has_ended;
    struct rbi_child_end *end;
};

/* ---- starting ---- */

/* A terminal's signals reach the program by themselves; others are handed on. */
static volatile sig_atomic_t child_pid;
static volatile sig_atomic_t early_signal; /* came before there was a program */

static void hand_on(int number, siginfo_t *info, void *context)
{
    (void)context;
    if (info->si_code == SI_KERNEL && (number == SIGINT || number == SIGQUIT))
        return;
    if (child_pid > 0)
        (void)kill((pid_t)child_pid, number);
    else
        early_signal = number;
}

/* What is ignored already, by nohup for example, stays so, in the program too. Those that the
 * program has at their default again are put into `defaults`. */
static void catch_signals(sigset_t *defaults)
{
    static const int caught[] = {SIGINT, SIGQUIT, SIGTERM, SIGHUP};
    (void)sigemptyset(defaults);
    (void)signal(SIGCHLD, SIG_DFL); /* or there would be no status to wait for */
    for (size_t i = 0; i < sizeof caught / sizeof *caught; i++) {
        struct sigaction ours = {.sa_sigaction = hand_on, .sa_flags = SA_SIGINFO}, before;
        if (sigaction(caught[i], NULL, &before) || before.sa_handler == SIG_IGN)
            continue;
        (void)sigaction(caught[i], &ours, NULL);
        (void)sigaddset(defaults, caught[i]);
    }
}

/* The program's end of the socket stays open in it; the library finds it by this. */
static bool name_socket(int socket)
{
    struct stat file;
    char text[64];
    if (fstat(socket, &file))
        return false;
    (void)snprintf(text, sizeof text, "%d:%llu", socket, (unsigned long long)file.st_ino);
    return setenv("REBATCH_REPORT_FD", text, 1) == 0;
}

static int spawn(pid_t *pid, char **arguments, int ours, bool quiet, const sigset_t *defaults)
{
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    (void)posix_spawn_file_actions_init(&actions);
    (void)posix_spawnattr_init(&attributes);
    (void)posix_spawnattr_setsigdefault(&attributes, defaults);
    (void)posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
    (void)posix_spawn_file_actions_addclose(&actions, ours);
    if (quiet)
        (void)posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
    const int error = posix_spawnp(pid, arguments[0], &actions, &attributes, arguments, environ);
    (void)posix_spawnattr_destroy(&attributes);
    (void)posix_spawn_file_actions_destroy(&actions);
    return error;
}

/* ---- while it runs ---- */

static void look_for_end(struct child *child, int flags)
{
    pid_t got;
    do
        got = waitpid(child->pid, &child->end->status, flags);
    while (got < 0 && errno == EINTR);
    child->has_ended = got != 0;
    if (child->has_ended)
        child_pid = 0;
}

/* "CODE LENGTH", a newline, LENGTH bytes for stderr, and what is for stdout. */
static void print_answer(struct rbi_child_end *end, const char *text)
{
    char *at;
    end->answer = (int)strtol(text, &at, 10);
    const size_t length = strtoul(at, &at, 10);
    if (*at != '\n' || strlen(at + 1) < length)
        return;
    end->has_answer = true;
    fwrite(at + 1, 1, length, stderr);
    fputs(at + 1 + length, stdout);
}

/* False at the end of the messages, or where there is none now. */
static bool hear(struct child *child)
{
    static char message[MESSAGE_BYTES];
    const ssize_t length = recv(child->socket, message, sizeof message - 1, MSG_DONTWAIT);
    if (length <= 0)
        return false;
    message[length] = '\0';
    child->end->has_stepped = true;
    char *text = strchr(message, ' ');
    if (text) {
        *text = '\0';
        if (strcmp(message, "answer") == 0 && !child->end->has_answer)
            print_answer(child->end, text + 1);
        else if (child->listener)
            child->listener->on_message(child->listener->user, message, text + 1);
    }
    return true;
}

static long now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (long)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* It may have left the socket to others that live on, so its end is looked for as well. */
static void watch(struct child *child)
{
    long done_at = 0;
    int signal_number = SIGTERM;
    while (!child->has_ended) {
        struct pollfd fd = {.fd = child->socket, .events = POLLIN};
        (void)poll(&fd, 1, LOOK_MS);
        if (fd.revents & POLLIN)
            (void)hear(child);
        else if (fd.revents && !child->end->has_answer) { /* nobody has the other end any more */
            look_for_end(child, 0);
            continue;
        } else if (fd.revents)
            (void)poll(NULL, 0, LOOK_MS);
        look_for_end(child, WNOHANG);
        if (child->end->has_answer && !done_at)
            done_at = now_ms();
        if (!child->has_ended && done_at && now_ms() - done_at > GRACE_MS) {
            (void)kill(child->pid, signal_number);
            signal_number = SIGKILL;
            done_at = now_ms();
        }
    }
    while (hear(child))
        ;
}

bool rbi_child_run(struct rbi_child_end *end, char **arguments, bool quiet,
                   const struct rbi_child_listener *listener)
{
    int sockets[2];
    *end = (struct rbi_child_end){0};
    struct child child = {.listener = listener, .end = end};
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets) || !name_socket(sockets[1])) {
        fprintf(stderr, "rebatch: no socket to the program: %s\n", strerror(errno));
        return false;
    }
    (void)fflush(stdout);
    sigset_t defaults;
    catch_signals(&defaults);
    child.socket = sockets[0];
    end->exec_error = spawn(&child.pid, arguments, sockets[0], quiet, &defaults);
    (void)close(sockets[1]);
    if (end->exec_error == 0) {
        child_pid = child.pid;
        if (early_signal)
            (void)kill(child.pid, early_signal);
        watch(&child);
    }
    (void)close(sockets[0]);
    return true;
}

/* ---- how it ended ---- */

int rbi_child_refuse(const char *program, int exec_error)
{
    fprintf(stderr, "rebatch: %.200s cannot be run: %s\n", program, strerror(exec_error));
    return exec_error == ENOENT ? 127 : 126;
}

struct rbi_child_text rbi_child_describe(int status)
{
    struct rbi_child_text text;
    if (WIFSIGNALED(status))
        (void)snprintf(text.text, sizeof text.text, "was ended by signal %d (%s)", WTERMSIG(status),
                       strsignal(WTERMSIG(status)));
    else
        (void)snprintf(text.text, sizeof text.text, "ended with status %d", WEXITSTATUS(status));
    return text;
}

/* ---- options ---- */

char **rbi_child_find(const char *command, int at, int count, char **arguments)
{
    if (at < 1 || strcmp(arguments[at - 1], "--") != 0) {
        if (at < count)
            fprintf(stderr,
                    "rebatch: \"%.60s\" is not an option: expected \"--\" before the program; see "
                    "'rebatch help %s'\n",
                    arguments[at], command);
        else
            fprintf(stderr,
                    "rebatch: there is no program: expected \"-- PROGRAM [ARGUMENT]...\"; see "
                    "'rebatch help %s'\n",
                    command);
        return NULL;
    }
    if (at < count)
        return arguments + at;
    fprintf(stderr, "rebatch: there is no program after \"--\"; see 'rebatch help %s'\n", command);
    return NULL;
}

bool rbi_child_set(const char *variable, const char *value)
{
    if (setenv(variable, value, 1) == 0)
        return true;
    fprintf(stderr, "rebatch: %s cannot be set: %s\n", variable, strerror(errno));
    return false;
}

/* Which option set which variable. */
#define OPTIONS_MOST 8
static struct {
    const char *option, *variable;
} given[OPTIONS_MOST];
static size_t given_count;

bool rbi_child_set_option(const char *option, const char *variable, const char *value)
{
    size_t at = 0;
    while (at < given_count && strcmp(given[at].variable, variable) != 0)
        at++;
    if (at < OPTIONS_MOST) {
        given[at].option = option;
        given[at].variable = variable;
        given_count += at == given_count;
    }
    return rbi_child_set(variable, value);
}

/* The option that set the variable whose name `text` begins with; NULL: none did. */
static const char *option_at(const char *text, size_t length)
{
    for (size_t i = 0; i < given_count; i++)
        if (strlen(given[i].variable) == length && memcmp(given[i].variable, text, length) == 0)
            return given[i].option;
    return NULL;
}

bool rbi_child_check(void)
{
    if (rbi_run_settings_check() == REBATCH_OK)
        return true;
    fputs("rebatch: ", stderr);
    for (const char *at = rebatch_last_error(); *at;) {
        const size_t name = strspn(at, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_");
        const char *const option = name ? option_at(at, name) : NULL;
        const size_t length = name ? name : 1;
        fprintf(stderr, "%.*s", option ? (int)strlen(option) : (int)length, option ? option : at);
        at += length;
    }
    fputs("\n", stderr);
    return false;
}
