/* Owns all memory: what each GPU has and how much of it is used, blocks, physical memory,
 * addresses, pinned memory. Must not know streams. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <initializer_list>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "standin.h"

namespace standin
{
namespace
{

struct block {
    size_t bytes;
    int gpu; /* -1: pinned memory of the host */
};

/* A piece of the file that holds all physical memory. It lives as long as its handle or a mapping
 * does. */
struct physical {
    size_t bytes;
    off_t offset;
    int gpu; /* -1: memory of the host */
    int uses;
    bool is_shareable;
    int file; /* of another process, which counts the memory; -1: the own one */
};

struct mapping {
    size_t bytes;
    unsigned long long physical;
};

/* What a process uses. Those with the same STANDIN_SHARED see each other's in that file. */
struct tenant {
    std::atomic<int> process; /* 0: nobody */
    std::atomic<size_t> used[GPUS_MOST];
};
const int TENANTS = 16;

struct state {
    std::mutex lock;
    size_t total[GPUS_MOST];
    size_t limit[GPUS_MOST]; /* what this process may use; the rest is as if another used it */
    tenant alone = {};
    tenant *tenants = nullptr; /* NULL: this one is alone */
    std::atomic<size_t> *used = alone.used;
    size_t peak[GPUS_MOST]; /* of `used` */
    size_t host_bytes;      /* that can still be mapped beside that of a GPU */
    size_t allocations = 0;
    /* How many allocations are still to succeed before one fails, or all do; 0: none fails. */
    size_t until_failure = 0;
    bool is_failing_for_ever = false;

    std::map<uintptr_t, block> blocks;   /* cudaMalloc, cudaHostAlloc */
    std::map<uintptr_t, block> pinned;   /* cudaHostRegister */
    std::map<uintptr_t, size_t> ranges;  /* reserved addresses */
    std::map<uintptr_t, mapping> mapped; /* in the ranges */
    std::map<unsigned long long, physical> physicals;
    unsigned long long last_handle = 0;
    int file = -1;
    off_t file_end = 0;

    state()
    {
        const char *text = getenv("STANDIN_MEMORY");
        const size_t bytes = text ? strtoull(text, nullptr, 10) : (size_t)8 << 30;
        const char *host = getenv("STANDIN_HOST");
        host_bytes = host ? strtoull(host, nullptr, 10) : 0;
        const char *most = getenv("STANDIN_LIMIT");
        const size_t limit_bytes = most ? strtoull(most, nullptr, 10) : bytes;
        for (int gpu = 0; gpu < GPUS_MOST; gpu++) {
            total[gpu] = bytes;
            limit[gpu] = limit_bytes;
            peak[gpu] = 0;
        }
        if (const char *path = getenv("STANDIN_SHARED"))
            join(path);
    }

    void join(const char *path)
    {
        const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        const size_t bytes = TENANTS * sizeof *tenants;
        if (fd < 0 || ftruncate(fd, (off_t)bytes))
            abort();
        tenants = (tenant *)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        for (int i = 0; i < TENANTS && used == alone.used; i++) {
            int process = tenants[i].process;
            if ((!process || !is_alive(process)) &&
                tenants[i].process.compare_exchange_strong(process, getpid()))
                used = tenants[i].used;
        }
        for (int gpu = 0; gpu < GPUS_MOST; gpu++)
            used[gpu] = 0;
    }

    /* What all use, this process too. */
    size_t taken(int gpu) const
    {
        size_t bytes = used[gpu];
        for (int i = 0; tenants && i < TENANTS; i++)
            if (tenants[i].used != used && tenants[i].process && is_alive(tenants[i].process))
                bytes += tenants[i].used[gpu];
        return bytes;
    }

    static bool is_alive(int process)
    {
        return kill(process, 0) == 0 || errno == EPERM;
    }
};

/* Never destroyed: libraries give memory back while the process ends. */
state &the_state(void)
{
    static state &s = *new state;
    return s;
}

size_t round_up(size_t bytes, size_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

void *map_fresh(size_t bytes, int protection)
{
    void *p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : p;
}

/* Counts an allocation, and says whether it is one that has to fail. */
bool must_fail(state &s)
{
    s.allocations++;
    if (s.until_failure == 0 || --s.until_failure > 0)
        return false;
    s.until_failure = s.is_failing_for_ever;
    return true;
}

bool take(state &s, size_t bytes, int gpu)
{
    if (gpu < 0) {
        if (bytes > s.host_bytes)
            return false;
        s.host_bytes -= bytes;
        return true;
    }
    const size_t taken = s.taken(gpu);
    if (must_fail(s) || taken > s.limit[gpu] || bytes > s.limit[gpu] - taken)
        return false;
    s.used[gpu] += bytes;
    if (s.used[gpu] > s.peak[gpu])
        s.peak[gpu] = s.used[gpu];
    return true;
}

void give(state &s, size_t bytes, int gpu)
{
    if (gpu < 0)
        s.host_bytes += bytes;
    else
        s.used[gpu] -= bytes;
}

/* The entry of `map` in which the address lies; its end when there is none. */
template <typename entries, typename size_of>
typename entries::iterator find_around(entries &map, uintptr_t address, size_of size)
{
    auto found = map.upper_bound(address);
    if (found == map.begin())
        return map.end();
    --found;
    return address - found->first < size(found->second) ? found : map.end();
}

size_t size_of_block(const block &b)
{
    return b.bytes;
}

void lose_use(state &s, std::map<unsigned long long, physical>::iterator found)
{
    physical &p = found->second;
    if (--p.uses > 0)
        return;
    if (p.file >= 0) {
        (void)close(p.file);
    } else {
        give(s, p.bytes, p.gpu);
        (void)fallocate(s.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, p.offset,
                        (off_t)p.bytes);
    }
    s.physicals.erase(found);
}

/* Whether there are whole mappings, without a gap and with none that ends elsewhere. */
bool is_mapped(const state &s, uintptr_t address, size_t bytes)
{
    uintptr_t at = address;
    for (auto i = s.mapped.find(at); i != s.mapped.end() && at < address + bytes; ++i) {
        if (i->first != at)
            break;
        at += i->second.bytes;
    }
    return bytes > 0 && at == address + bytes;
}

/* Makes addresses of a range empty again. */
code clear(uintptr_t address, size_t bytes)
{
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    return mmap((void *)address, bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED ? OUT_OF_MEMORY : OK;
}

} // namespace

/* ---- blocks ---- */

code alloc(void **out, size_t bytes, int gpu)
{
    *out = nullptr;
    if (const code refused = check_unsafe())
        return refused;
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    if (bytes == 0)
        return OK;
    if (bytes > SIZE_MAX - PAGE_BYTES)
        return OUT_OF_MEMORY;
    bytes = round_up(bytes, PAGE_BYTES);
    if (!take(s, bytes, gpu))
        return OUT_OF_MEMORY;
    void *memory = map_fresh(bytes, PROT_READ | PROT_WRITE);
    if (!memory) {
        s.used[gpu] -= bytes;
        return OUT_OF_MEMORY;
    }
    s.blocks[(uintptr_t)memory] = {bytes, gpu};
    *out = memory;
    return OK;
}

code release(void *memory)
{
    if (const code refused = check_unsafe())
        return refused;
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    if (!memory)
        return OK;
    const auto found = s.blocks.find((uintptr_t)memory);
    if (found == s.blocks.end() || found->second.gpu < 0)
        return INVALID;
    munmap(memory, found->second.bytes);
    s.used[found->second.gpu] -= found->second.bytes;
    s.blocks.erase(found);
    return OK;
}

code alloc_pinned(void **out, size_t bytes)
{
    *out = nullptr;
    if (const code refused = check_unsafe())
        return refused;
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    if (bytes == 0)
        return OK;
    *out = map_fresh(bytes, PROT_READ | PROT_WRITE);
    if (!*out)
        return OUT_OF_MEMORY;
    s.blocks[(uintptr_t)*out] = {bytes, -1};
    return OK;
}

code release_pinned(void *memory)
{
    if (const code refused = check_unsafe())
        return refused;
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    if (!memory)
        return OK;
    const auto found = s.blocks.find((uintptr_t)memory);
    if (found == s.blocks.end() || found->second.gpu >= 0)
        return INVALID;
    munmap(memory, found->second.bytes);
    s.blocks.erase(found);
    return OK;
}

code pin(void *memory, size_t bytes)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    if (!memory || bytes == 0)
        return INVALID;
    const bool is_new = s.pinned.emplace((uintptr_t)memory, block{bytes, -1}).second;
    return is_new ? OK : INVALID;
}

code unpin(void *memory)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    return s.pinned.erase((uintptr_t)memory) ? OK : INVALID;
}

void memory_info(size_t *free_bytes, size_t *total_bytes, int gpu)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    *total_bytes = s.total[gpu];
    const size_t taken = s.taken(gpu);
    *free_bytes = s.limit[gpu] > taken ? s.limit[gpu] - taken : 0;
}

owner owner_of(const void *address)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    const uintptr_t at = (uintptr_t)address;
    for (auto *map : {&s.blocks, &s.pinned}) {
        const auto found = find_around(*map, at, size_of_block);
        if (found != map->end()) {
            const block &b = found->second;
            return {b.gpu < 0 ? owner::PINNED : owner::GPU, b.gpu < 0 ? 0 : b.gpu,
                    (void *)found->first, b.bytes};
        }
    }
    const auto found = find_around(s.mapped, at, [](const mapping &m) { return m.bytes; });
    if (found == s.mapped.end())
        return {owner::NOBODY, 0, nullptr, 0};
    const int gpu = s.physicals.at(found->second.physical).gpu;
    return {owner::GPU, gpu < 0 ? 0 : gpu, (void *)found->first, found->second.bytes};
}

/* ---- physical memory and addresses ---- */

code create(unsigned long long *out, size_t bytes, int gpu, bool is_shareable)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    if (bytes == 0 || bytes % PAGE_BYTES)
        return INVALID;
    if (s.file < 0)
        s.file = memfd_create("standin", MFD_CLOEXEC);
    if (s.file < 0)
        return NOT_SUPPORTED;
    if (!take(s, bytes, gpu))
        return OUT_OF_MEMORY;
    /* A place in the file is used once: the file has holes where memory was given back. */
    if (ftruncate(s.file, s.file_end + (off_t)bytes)) {
        give(s, bytes, gpu);
        return OUT_OF_MEMORY;
    }
    s.physicals[++s.last_handle] = {bytes, s.file_end, gpu, 1, is_shareable, -1};
    s.file_end += (off_t)bytes;
    *out = s.last_handle;
    return OK;
}

/* A descriptor of the file whose position is where the memory lies: positions go to other processes
 * with it. */
code export_physical(int *fd, unsigned long long handle)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    const auto found = s.physicals.find(handle);
    if (found == s.physicals.end() || !found->second.is_shareable)
        return INVALID;
    const std::string path = "/proc/self/fd/" + std::to_string(s.file);
    *fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (*fd < 0)
        return NOT_SUPPORTED;
    lseek(*fd, found->second.offset, SEEK_SET);
    return OK;
}

code import_physical(unsigned long long *out, int fd)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    struct stat file;
    const off_t offset = lseek(fd, 0, SEEK_CUR);
    const int own = offset < 0 || fstat(fd, &file) ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0)
        return INVALID;
    s.physicals[++s.last_handle] = {(size_t)(file.st_size - offset), offset, 0, 1, false, own};
    *out = s.last_handle;
    return OK;
}

code drop(unsigned long long handle)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    const auto found = s.physicals.find(handle);
    if (found == s.physicals.end())
        return INVALID;
    lose_use(s, found);
    return OK;
}

code reserve(uintptr_t *out, size_t bytes, size_t alignment, uintptr_t wish)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    if (bytes == 0 || bytes % PAGE_BYTES || (alignment & (alignment - 1)))
        return INVALID;
    if (alignment < PAGE_BYTES)
        alignment = PAGE_BYTES;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *begin = (char *)mmap((void *)wish, bytes + alignment, PROT_NONE, flags, -1, 0);
    if (begin == MAP_FAILED)
        return OUT_OF_MEMORY;
    char *aligned = (char *)round_up((uintptr_t)begin, alignment);
    if (aligned > begin)
        munmap(begin, (size_t)(aligned - begin));
    munmap(aligned + bytes, (size_t)(begin + alignment - aligned));
    *out = (uintptr_t)aligned;
    s.ranges[*out] = bytes;
    return OK;
}

code unreserve(uintptr_t address, size_t bytes)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    const auto found = s.ranges.find(address);
    const auto inside = s.mapped.lower_bound(address);
    if (found == s.ranges.end() || found->second != bytes ||
        (inside != s.mapped.end() && inside->first < address + bytes))
        return INVALID;
    munmap((void *)address, bytes);
    s.ranges.erase(found);
    return OK;
}

code map(uintptr_t address, size_t bytes, size_t offset, unsigned long long handle)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    const auto found = s.physicals.find(handle);
    const auto range = find_around(s.ranges, address, [](size_t size) { return size; });
    const auto next = s.mapped.lower_bound(address);
    if (found == s.physicals.end() || range == s.ranges.end() || bytes == 0 || bytes % PAGE_BYTES ||
        address % PAGE_BYTES || offset + bytes > found->second.bytes ||
        address + bytes > range->first + range->second ||
        (next != s.mapped.end() && next->first < address + bytes) ||
        find_around(s.mapped, address, [](const mapping &m) { return m.bytes; }) != s.mapped.end())
        return INVALID;
    const int file = found->second.file < 0 ? s.file : found->second.file;
    if (mmap((void *)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file,
             found->second.offset + (off_t)offset) == MAP_FAILED)
        return OUT_OF_MEMORY;
    found->second.uses++;
    s.mapped[address] = {bytes, handle};
    return OK;
}

code unmap(uintptr_t address, size_t bytes)
{
    note_unmap();
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    if (!is_mapped(s, address, bytes))
        return INVALID;
    const code result = clear(address, bytes);
    for (auto i = s.mapped.find(address); i != s.mapped.end() && i->first < address + bytes;) {
        lose_use(s, s.physicals.find(i->second.physical));
        i = s.mapped.erase(i);
    }
    return result;
}

/* Each call, the latest last. */
struct Access {
    uintptr_t address;
    size_t bytes;
    uint32_t gpus;
};
std::vector<Access> accesses;

code set_access(uintptr_t address, size_t bytes, uint32_t gpus, bool may_write)
{
    {
        state &s = the_state();
        const std::lock_guard<std::mutex> guard(s.lock);
        if (!is_mapped(s, address, bytes))
            return INVALID;
        accesses.push_back({address, bytes, gpus});
    }
    const int protection = (gpus ? PROT_READ : PROT_NONE) | (may_write ? PROT_WRITE : 0);
    return mprotect((void *)address, bytes, protection) ? INVALID : OK;
}

size_t fill_most(void)
{
    static const size_t most = [] {
        const char *text = getenv("STANDIN_FILL_MOST");
        return text ? (size_t)strtoull(text, nullptr, 10) : SIZE_MAX;
    }();
    return most;
}

bool has_host_memory(void)
{
    static const bool has = getenv("STANDIN_HOST") != nullptr;
    return has;
}

} // namespace standin

/* ---- what a test controls, by ctypes ---- */

using standin::is_gpu;
using standin::the_state;

/* Whether kernels of a GPU may use the mapped memory at an address. */
STANDIN_API int standin_can_access(size_t gpu, uintptr_t address)
{
    const std::lock_guard<std::mutex> guard(the_state().lock);
    for (size_t i = standin::accesses.size(); i-- > 0;) {
        const standin::Access &a = standin::accesses[i];
        if (address >= a.address && address - a.address < a.bytes)
            return a.gpus >> gpu & 1;
    }
    return 0;
}

/* From now on this process may use so much memory of a GPU; what is used already stays. */
STANDIN_API void standin_set_memory(size_t gpu, size_t bytes)
{
    auto &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    if (!is_gpu((int)gpu))
        return;
    s.limit[gpu] = bytes;
    if (bytes > s.total[gpu])
        s.total[gpu] = bytes;
}

STANDIN_API size_t standin_used(size_t gpu)
{
    auto &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    return is_gpu((int)gpu) ? s.used[gpu].load() : 0;
}

/* The most that was in use at once, since `restart`. */
STANDIN_API size_t standin_peak(size_t gpu, bool restart)
{
    auto &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    if (!is_gpu((int)gpu))
        return 0;
    if (restart)
        s.peak[gpu] = s.used[gpu];
    return s.peak[gpu];
}

/* The n-th allocation from now on fails, however much memory is free; 0: none does. */
STANDIN_API void standin_fail_at(size_t n)
{
    auto &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    s.until_failure = n;
    s.is_failing_for_ever = false;
}

/* The same, and all after it: PyTorch tries again after one that failed. */
STANDIN_API void standin_fail_from(size_t n)
{
    auto &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    s.until_failure = n;
    s.is_failing_for_ever = n > 0;
}

/* How often memory of a GPU was asked for: cudaMalloc, cuMemAlloc, cuMemCreate. */
STANDIN_API size_t standin_allocations(void)
{
    auto &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    return s.allocations;
}
