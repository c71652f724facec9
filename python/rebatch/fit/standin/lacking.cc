/* Owns what is said of functions that the stand-in has not: those that a program takes from CUDA's
 * shared libraries, where the stand-in was built for another, and those that would give memory.
 * Must not know what a function does. */
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <regex.h>
#include <stdio.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

#include <set>
#include <string>

#include "standin.h"

namespace
{

struct search {
    regex_t taken, real; /* as build has them */
    void *own;
    std::set<std::string> lacking;
};

/* Of a loaded object: what relocations refer to, as the table of symbols does not tell its size. */
struct object {
    const ElfW(Sym) * symbols;
    const char *names;
    const ElfW(Rela) * relocations[2];
    size_t bytes[2];
};

void look_at(search &s, const object &o)
{
    for (int i = 0; i < 2; i++)
        for (size_t r = 0; r < o.bytes[i] / sizeof(ElfW(Rela)); r++) {
            const ElfW(Sym) &symbol = o.symbols[ELF64_R_SYM(o.relocations[i][r].r_info)];
            const char *const name = o.names + symbol.st_name;
            if (symbol.st_shndx == SHN_UNDEF && ELF64_ST_BIND(symbol.st_info) == STB_GLOBAL &&
                !regexec(&s.taken, name, 0, nullptr, 0) && regexec(&s.real, name, 0, nullptr, 0) &&
                !dlsym(s.own, name))
                s.lacking.insert(name);
        }
}

/* CUDA's own libraries are not asked: what they take of each other is no matter. */
int visit(dl_phdr_info *info, size_t, void *user)
{
    const char *const slash = strrchr(info->dlpi_name, '/');
    object o = {};
    if (slash && (!strncmp(slash, "/libcu", 6) || !strncmp(slash, "/libnv", 6)))
        return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type != PT_DYNAMIC)
            continue;
        auto entry = (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
        for (; entry->d_tag != DT_NULL; entry++) {
            const ElfW(Addr) value = entry->d_un.d_ptr;
            switch (entry->d_tag) {
            case DT_SYMTAB:
                o.symbols = (const ElfW(Sym) *)value;
                break;
            case DT_STRTAB:
                o.names = (const char *)value;
                break;
            case DT_RELA:
                o.relocations[0] = (const ElfW(Rela) *)value;
                break;
            case DT_RELASZ:
                o.bytes[0] = value;
                break;
            case DT_JMPREL:
                o.relocations[1] = (const ElfW(Rela) *)value;
                break;
            case DT_PLTRELSZ:
                o.bytes[1] = value;
                break;
            }
        }
    }
    /* The kernel's own object is not relocated. */
    if (o.symbols && o.names && (uintptr_t)o.symbols > info->dlpi_addr)
        look_at(*(search *)user, o);
    return 0;
}

/* Its calls would go to the real libraries, which know nothing of the stand-in's handles. */
__attribute__((constructor)) void check_program(void)
{
    Dl_info where;
    search s;
    if (!dladdr((void *)check_program, &where) ||
        !(s.own = dlopen(where.dli_fname, RTLD_LAZY | RTLD_NOLOAD)) ||
        regcomp(&s.taken, TAKEN, REG_EXTENDED | REG_NOSUB) ||
        regcomp(&s.real, REAL, REG_EXTENDED | REG_NOSUB))
        return;
    (void)dl_iterate_phdr(visit, &s);
    std::string names;
    for (const std::string &name : s.lacking)
        names += (names.empty() ? "" : ", ") + name;
    if (s.lacking.empty())
        return;
    fprintf(stderr,
            "rebatch: this stand-in for CUDA was built for another program, and lacks %s, which %s "
            "calls: build one for it, by `build PROGRAM FOLDER`\n",
            names.c_str(), program_invocation_short_name);
    _exit(1);
}

} // namespace

/* A program that has CUDA's runtime within it finds too little of the driver to begin. */
void standin::note_missing(const void *caller)
{
    static bool is_said;
    Dl_info asks, program;
    if (is_said || !dladdr(caller, &asks) || !dladdr((void *)getauxval(AT_PHDR), &program) ||
        asks.dli_fbase != program.dli_fbase)
        return;
    is_said = true;
    fprintf(stderr,
            "rebatch: the stand-in for CUDA takes the place of shared libraries, and %s has CUDA's "
            "runtime within it: link it with nvcc's -cudart shared\n",
            program_invocation_short_name);
}

/* Of a function that would give memory (build): it gives none. */
extern "C" int standin_lacks(const char *name)
{
    fprintf(stderr, "rebatch: the stand-in for CUDA lacks %s: it answers \"not supported\"\n",
            name);
    return standin::NOT_SUPPORTED;
}
