/* Owns the ranks whose numbers are in the environment, each with a GPU of its own: their votes, and
 * what two of them send each other, both by NCCL. Must not know what they train.
 *
 * RANK, WORLD_SIZE and LOCAL_RANK are as torchrun sets them; without them there is one rank.
 * GPT_RANKS_FILE is a file that does not exist yet, in a folder that all ranks see: by it they find
 * each other. */
#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gpt/error.h"
#include "gpt/ranks.h"
#include "rebatch/nccl.h"

#define TIMEOUT_MS 300000
#define PATH_BYTES 4096

static rebatch_nccl votes;
static ncclComm_t comm;

static rebatch_status check(ncclResult_t result)
{
    return result == ncclSuccess || result == ncclInProgress ? REBATCH_OK
                                                             : rebatch_from_nccl(NULL, (int)result);
}

static rebatch_status swap(uint32_t other, const void *mine, void *theirs, size_t bytes,
                           rebatch_stream stream)
{
    const cudaStream_t its = (cudaStream_t)stream;
    rebatch_status status = check(ncclGroupStart());
    if (status)
        return status;
    status = check(ncclSend(mine, bytes, ncclInt8, (int)other, comm, its));
    if (!status)
        status = check(ncclRecv(theirs, bytes, ncclInt8, (int)other, comm, its));
    const rebatch_status ended = check(ncclGroupEnd());
    if (!status)
        status = ended;
    if (!status)
        status = rebatch_nccl_wait(comm, its, TIMEOUT_MS);
    return status == REBATCH_E_PEER
               ? gpt_error(status, "rank %u sent no gradients within %d ms", other, TIMEOUT_MS)
               : status;
}

/* ---- how ranks find each other ---- */

static rebatch_status read_number(size_t *out, const char *name, size_t otherwise)
{
    const char *const text = getenv(name);
    char *end = NULL;
    *out = text ? strtoul(text, &end, 10) : otherwise;
    return !text || (end > text && *end == '\0' && *out <= INT_MAX)
               ? REBATCH_OK
               : gpt_error(REBATCH_E_INVALID, "%s is \"%s\": expected a number", name, text);
}

/* The file appears whole, by a rename. */
static rebatch_status write_id(const ncclUniqueId *id, const char *path)
{
    char whole[PATH_BYTES];
    if (access(path, F_OK) == 0)
        return gpt_error(REBATCH_E_INVALID,
                         "GPT_RANKS_FILE is %s, which exists: expected a file of this run's own",
                         path);
    (void)snprintf(whole, sizeof whole, "%s.part", path);
    FILE *const file = fopen(whole, "wb");
    bool is_written = file && fwrite(id, sizeof *id, 1, file) == 1;
    if (file && fclose(file))
        is_written = false;
    return is_written && rename(whole, path) == 0
               ? REBATCH_OK
               : gpt_error(REBATCH_E_IO, "%s: %s", path, strerror(errno));
}

static rebatch_status read_id(ncclUniqueId *out, const char *path)
{
    for (int ms = 0; ms < TIMEOUT_MS; ms += 10) {
        FILE *const file = fopen(path, "rb");
        const bool is_read = file && fread(out, sizeof *out, 1, file) == 1;
        if (file)
            (void)fclose(file);
        if (is_read)
            return REBATCH_OK;
        (void)poll(NULL, 0, 10);
    }
    return gpt_error(REBATCH_E_PEER, "rank 0 did not write %s within %d ms", path, TIMEOUT_MS);
}

static rebatch_status agree(ncclUniqueId *id, size_t rank, size_t size, const char *path)
{
    rebatch_status status = REBATCH_OK;
    if (size > 1 && (!path || strlen(path) + sizeof ".part" > PATH_BYTES))
        return gpt_error(REBATCH_E_INVALID,
                         "GPT_RANKS_FILE is %s: expected a file that all %zu ranks see",
                         path ? "too long" : "not set", size);
    if (rank > 0)
        return read_id(id, path);
    status = check(ncclGetUniqueId(id));
    return status || size == 1 ? status : write_id(id, path);
}

/* Ends when all ranks have called it. */
static rebatch_status connect_ranks(struct gpt_ranks *out, size_t rank, size_t size)
{
    const char *const path = getenv("GPT_RANKS_FILE");
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id;
    config.blocking = 0;
    rebatch_status status = agree(&id, rank, size, path);
    if (!status)
        status = check(ncclCommInitRankConfig(&comm, (int)size, id, (int)rank, &config));
    if (!status)
        status = rebatch_nccl_wait(comm, NULL, TIMEOUT_MS);
    if (!status)
        status = rebatch_group_nccl(&out->group, &votes, comm);
    if (rank == 0 && size > 1)
        (void)unlink(path);
    return status ? gpt_error(status, "rank %zu of %zu found no other one: %s", rank, size,
                              rebatch_last_error())
                  : REBATCH_OK;
}

rebatch_status gpt_ranks_open(struct gpt_ranks *out)
{
    size_t rank, size, gpu;
    char ordinal[24];
    *out = (struct gpt_ranks){.swap = swap, .is_on_device = true};
    rebatch_status status = read_number(&size, "WORLD_SIZE", 1);
    if (!status)
        status = read_number(&rank, "RANK", 0);
    if (!status)
        status = read_number(&gpu, "LOCAL_RANK", rank);
    if (status)
        return status;
    if (rank >= size || (size & (size - 1)))
        return gpt_error(rank >= size ? REBATCH_E_INVALID : REBATCH_E_UNSUPPORTED,
                         "this is rank %zu of %zu: expected a power of two, and a smaller number",
                         rank, size);
    (void)snprintf(ordinal, sizeof ordinal, "%zu", gpu);
    if (setenv("REBATCH_DEVICE_ORDINAL", ordinal, 0))
        return gpt_error(REBATCH_E_HOST_OOM, "REBATCH_DEVICE_ORDINAL cannot be set");
    status = rebatch_from_cuda(NULL, (int)cudaSetDevice((int)gpu));
    return status ? gpt_error(status, "rank %zu has no GPU %zu", rank, gpu)
                  : connect_ranks(out, rank, size);
}

void gpt_ranks_close(struct gpt_ranks *ranks, rebatch_status status)
{
    if (!ranks->group.all_reduce || votes.is_aborted)
        return;
    rebatch_nccl_close(&votes);
    if (status) { /* others may be in a collective */
        (void)ncclCommAbort(comm);
        return;
    }
    if (!check(ncclCommFinalize(comm)) && !rebatch_nccl_wait(comm, NULL, TIMEOUT_MS))
        (void)ncclCommDestroy(comm);
}
