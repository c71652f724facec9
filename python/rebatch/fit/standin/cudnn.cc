/* Owns cuDNN's graphs. With STANDIN_CUDNN, the properties of a GPU in cuDNN's JSON, cuDNN itself
 * answers for that GPU which engines it would use and how much workspace they need: since 9.8 it
 * does so without a GPU. Without the variable each question has one simple answer.
 * Must not know convolutions or attention. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "standin.h"

namespace
{

/* Of cudnn_graph.h. */
enum attribute {
    HEUR_OPERATION_GRAPH = 201,
    HEUR_DEVICEPROP = 204,
    PLAN_ENGINE_CONFIG = 401,
    PLAN_WORKSPACE_SIZE = 402,
    PLAN_DEVICEPROP = 407,
    ENGINE_OPERATION_GRAPH = 1300,
    ENGINE_DEVICEPROP = 1307,
    DEVICEPROP_JSON = 2702,
};
enum type { HANDLE = 0, INT64 = 3, DESCRIPTOR = 15, CHAR = 24 };
constexpr int DEVICEPROP_DESCRIPTOR = 38;
constexpr int64_t SIMPLE_WORKSPACE_BYTES = 1 << 20;

char simple; /* all descriptors of the simple answers */

/* cuDNN's own functions, and the properties of the GPU as a descriptor of its. */
struct cudnn {
    int (*create)(int, void **) = nullptr;
    int (*destroy)(void *) = nullptr;
    int (*finalize)(void *) = nullptr;
    int (*set)(void *, int, int, int64_t, const void *) = nullptr;
    int (*get)(void *, int, int, int64_t, int64_t *, void *) = nullptr;
    void *gpu = nullptr; /* NULL: answers are simple */

    cudnn()
    {
        const char *json = getenv("STANDIN_CUDNN");
        void *library = json ? dlopen("libcudnn.so.9", RTLD_LAZY | RTLD_NOLOAD) : nullptr;
        if (!library)
            return;
        find(create, library, "cudnnBackendCreateDescriptor");
        find(destroy, library, "cudnnBackendDestroyDescriptor");
        find(finalize, library, "cudnnBackendFinalize");
        find(set, library, "cudnnBackendSetAttribute");
        find(get, library, "cudnnBackendGetAttribute");
        void *made = nullptr;
        if (create && destroy && finalize && set && get && !create(DEVICEPROP_DESCRIPTOR, &made) &&
            !set(made, DEVICEPROP_JSON, CHAR, (int64_t)strlen(json), json) && !finalize(made))
            gpu = made;
    }

    template <typename function> static void find(function &out, void *library, const char *name)
    {
        out = (function)dlsym(library, name);
    }
};

cudnn &the_cudnn(void)
{
    static cudnn &c = *new cudnn;
    return c;
}

/* What says for which GPU, beside the attribute that is being set; 0: nothing. */
int device_attribute(int name)
{
    switch (name) {
    case HEUR_OPERATION_GRAPH:
        return HEUR_DEVICEPROP;
    case ENGINE_OPERATION_GRAPH:
        return ENGINE_DEVICEPROP;
    case PLAN_ENGINE_CONFIG:
        return PLAN_DEVICEPROP;
    default:
        return 0;
    }
}

} // namespace

STANDIN_API int cudnnCreate(void **out)
{
    standin::note_library(standin::CUDNN);
    *out = standin::new_handle();
    return 0;
}

STANDIN_API int cudnnBackendCreateDescriptor(int kind, void **out)
{
    if (the_cudnn().gpu)
        return the_cudnn().create(kind, out);
    *out = &simple;
    return 0;
}

STANDIN_API int cudnnBackendDestroyDescriptor(void *descriptor)
{
    return the_cudnn().gpu ? the_cudnn().destroy(descriptor) : 0;
}

STANDIN_API int cudnnBackendFinalize(void *descriptor)
{
    return the_cudnn().gpu ? the_cudnn().finalize(descriptor) : 0;
}

/* There is no handle of cuDNN's own: its place is taken by the properties of the GPU. */
STANDIN_API int cudnnBackendSetAttribute(void *descriptor, int name, int kind, int64_t count,
                                         const void *values)
{
    cudnn &c = the_cudnn();
    if (!c.gpu || kind == HANDLE)
        return 0;
    const int device = device_attribute(name);
    const int error = device ? c.set(descriptor, device, DESCRIPTOR, 1, &c.gpu) : 0;
    return error ? error : c.set(descriptor, name, kind, count, values);
}

STANDIN_API int cudnnBackendGetAttribute(void *descriptor, int name, int kind, int64_t asked,
                                         int64_t *count, void *values)
{
    if (the_cudnn().gpu)
        return the_cudnn().get(descriptor, name, kind, asked, count, values);
    if (kind == INT64 && values)
        *(int64_t *)values = name == PLAN_WORKSPACE_SIZE ? SIMPLE_WORKSPACE_BYTES : 0;
    if (count)
        *count = kind == INT64 || kind == DESCRIPTOR;
    return 0;
}
