/* For binaries that run with glibc 2.28 and libstdc++ 8, built where newer ones are: scripts/wheel
 * has the compiler include this file first. It names the versions of functions that both have.
 * auditwheel finds what is missing here. */
#pragma once
#include <features.h>

/* Since 2.38 strtol(), sscanf() and their like are functions of C23's where _GNU_SOURCE is defined;
 * <features.h> names that after C2X until 2.39. */
#undef __GLIBC_USE_C2X_STRTOL
#define __GLIBC_USE_C2X_STRTOL 0
#undef __GLIBC_USE_C23_STRTOL
#define __GLIBC_USE_C23_STRTOL 0

/* The first version of glibc on a processor, and of its struct stat. */
#if defined __x86_64__
#define RBI_GLIBC "GLIBC_2.2.5"
#define RBI_STAT_VERSION 1
#elif defined __aarch64__
#define RBI_GLIBC "GLIBC_2.17"
#define RBI_STAT_VERSION 0
#else
#error "rebatch: glibc's first version for this processor is unknown; expected x86-64 or aarch64"
#endif
#define RBI_FIRST(name) __asm__(".symver " #name "," #name "@" RBI_GLIBC);

/* Moved to libc.so in 2.32 and 2.34. */
RBI_FIRST(dladdr)
RBI_FIRST(dlclose)
RBI_FIRST(dlopen)
RBI_FIRST(dlvsym)
#ifndef RBI_DEFINES_DLSYM
RBI_FIRST(dlsym)
#endif
RBI_FIRST(pthread_attr_setstacksize)
RBI_FIRST(pthread_create)
RBI_FIRST(pthread_join)
RBI_FIRST(pthread_once)
RBI_FIRST(pthread_sigmask)
/* Since 2.29 it leaves errors to errno. */
RBI_FIRST(pow)

#ifdef __cplusplus
/* A variable since 2.32; zero: several threads can run. */
#include <sys/single_threaded.h>
extern "C" __attribute__((visibility("hidden"), weak)) char __libc_single_threaded = 0;
/* What C++20 added to string streams is compiled rather than taken from libstdc++. */
#include <istream>
#include <string>
#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 0
#include <sstream>
#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 1
#else
/* Functions since 2.33. */
#include <sys/stat.h>
extern int __xstat(int, const char *, struct stat *);
extern int __fxstat(int, int, struct stat *);
extern int __lxstat(int, const char *, struct stat *);
RBI_FIRST(__xstat)
RBI_FIRST(__fxstat)
RBI_FIRST(__lxstat)
#define stat(path, status) __xstat(RBI_STAT_VERSION, path, status)
#define fstat(descriptor, status) __fxstat(RBI_STAT_VERSION, descriptor, status)
#define lstat(path, status) __lxstat(RBI_STAT_VERSION, path, status)

/* A program begins with the version of 2.34; the linker's --wrap leads here. Without constructors
 * the older one is the same. */
typedef int rbi_start(int (*)(int, char **, char **), int, char **, void (*)(void), void (*)(void),
                      void (*)(void), void *);
extern rbi_start rbi_first_start;
__asm__(".symver rbi_first_start,__libc_start_main@" RBI_GLIBC);
extern rbi_start __wrap___libc_start_main;
__attribute__((weak, visibility("hidden"))) int
__wrap___libc_start_main(int (*run)(int, char **, char **), int count, char **arguments,
                         void (*begin)(void), void (*end)(void), void (*unload)(void), void *stack)
{
    return rbi_first_start(run, count, arguments, begin, end, unload, stack);
}
#endif
