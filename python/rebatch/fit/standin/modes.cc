/* Owns what PyTorch sees of the dispatch modes that watch a program: nothing, so that it adds up
 * gradients in place and takes the ways that it takes without them. Must not know what they do. */
#include <dlfcn.h>

#include <string.h>

#include <atomic>

#include "standin.h"

namespace
{

std::atomic<long> hidden{0};

} // namespace

/* So many modes, the outermost of each thread that has any, are not seen. */
STANDIN_API void standin_hide_modes(long count)
{
    hidden = count;
}

namespace c10::impl
{

/* In the place of PyTorch's, which its libraries call. The one that runs modes has to see all. */
__attribute__((visibility("default"))) bool dispatch_mode_enabled()
{
    static void *const own = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
    static const auto plain = (bool (*)())dlsym(own, "_ZN3c104impl21dispatch_mode_enabledEv");
    static const auto count =
        (long (*)())dlsym(own, "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv");
    if (!plain() || count() > hidden)
        return plain();
    Dl_info caller = {};
    return dladdr(__builtin_return_address(0), &caller) &&
           strstr(caller.dli_fname, "libtorch_python");
}

} // namespace c10::impl
