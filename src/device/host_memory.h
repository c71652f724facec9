/* Virtual memory of the host device: address space, and physical memory as pieces of a memory file.
 * Must not know caps or who asks. */
#ifndef RBI_HOST_MEMORY_H
#define RBI_HOST_MEMORY_H

#include "device/device.h"

/* A file in memory. A piece is its offset in it; offsets are used once, and a piece that was given
 * back takes no memory any more. Not safe from several threads by itself, but for mapping. */
struct rbi_host_file {
    int descriptor; /* -1: not made yet */
    uint64_t end;   /* offset of the next piece; it begins at one page, so that no piece is 0 */
};
#define RBI_HOST_FILE_INIT ((struct rbi_host_file){.descriptor = -1, .end = 0})

rebatch_status rbi_host_file_take(struct rbi_host_file *file, rbi_physical *out, size_t bytes);
rebatch_status rbi_host_file_give(struct rbi_host_file *file, rbi_physical physical, size_t bytes);
void rbi_host_file_close(struct rbi_host_file *file);

rebatch_status rbi_host_reserve(void **out, size_t bytes);
rebatch_status rbi_host_unreserve(void *address, size_t bytes);
/* A descriptor of the file whose position is where the physical memory lies; and such a one of
 * another process, mapped. */
rebatch_status rbi_host_file_export(const struct rbi_host_file *file, int *fd,
                                    rbi_physical physical);
rebatch_status rbi_host_map_export(void *address, size_t bytes, int fd);
rebatch_status rbi_host_map(const struct rbi_host_file *file, void *address, size_t bytes,
                            rbi_physical physical);
rebatch_status rbi_host_set_access(void *address, size_t bytes);
rebatch_status rbi_host_unmap(void *address, size_t bytes);

#endif
