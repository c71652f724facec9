/* Owns cuDNN's graphs. With STANDIN_CUDNN, the properties of a GPU in cuDNN's JSON, cuDNN itself
 * answers for that GPU which engines it would use and how much workspace they need: since 9.8 it
 * does so without a GPU. A plan is compiled only if more than its workspace is asked for:
 * attention's take half a second each. Without the variable each question has one simple answer.
 * Must not know convolutions or attention. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include <mutex>
#include <unordered_map>

#include "standin.h"

namespace
{

/* Of cudnn_graph.h. */
enum attribute {
    HEUR_OPERATION_GRAPH = 201,
    HEUR_DEVICEPROP = 204,
    CONFIG_WORKSPACE_SIZE = 303,
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

/* Plans that are not compiled: the workspace of each. */
struct plans {
    std::mutex mutex;
    std::unordered_map<void *, int64_t> workspaces;

    void add(void *plan, int64_t bytes)
    {
        std::lock_guard<std::mutex> lock(mutex);
        workspaces[plan] = bytes;
    }

    bool has(void *plan, int64_t *bytes)
    {
        std::lock_guard<std::mutex> lock(mutex);
        const auto found = workspaces.find(plan);
        if (found == workspaces.end())
            return false;
        *bytes = found->second;
        return true;
    }

    void remove(void *plan)
    {
        std::lock_guard<std::mutex> lock(mutex);
        workspaces.erase(plan);
    }
};

plans &the_plans(void)
{
    static plans &p = *new plans;
    return p;
}

/* Notes the workspace of a plan, if cuDNN knows it by the configuration. */
void note_workspace(void *plan, void *configuration)
{
    int64_t bytes = 0, count = 0;
    if (!the_cudnn().get(configuration, CONFIG_WORKSPACE_SIZE, INT64, 1, &count, &bytes) &&
        count == 1)
        the_plans().add(plan, bytes);
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
    if (!the_cudnn().gpu)
        return 0;
    the_plans().remove(descriptor);
    return the_cudnn().destroy(descriptor);
}

STANDIN_API int cudnnBackendFinalize(void *descriptor)
{
    int64_t workspace;
    if (!the_cudnn().gpu || the_plans().has(descriptor, &workspace))
        return 0;
    return the_cudnn().finalize(descriptor);
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
    if (!error && name == PLAN_ENGINE_CONFIG)
        note_workspace(descriptor, *(void *const *)values);
    return error ? error : c.set(descriptor, name, kind, count, values);
}

STANDIN_API int cudnnBackendGetAttribute(void *descriptor, int name, int kind, int64_t asked,
                                         int64_t *count, void *values)
{
    int64_t workspace;
    if (the_cudnn().gpu && the_plans().has(descriptor, &workspace)) {
        if (name == PLAN_WORKSPACE_SIZE && asked >= 1 && values) {
            *(int64_t *)values = workspace;
            if (count)
                *count = 1;
            return 0;
        }
        the_plans().remove(descriptor);
        const int error = the_cudnn().finalize(descriptor);
        if (error)
            return error;
    }
    if (the_cudnn().gpu)
        return the_cudnn().get(descriptor, name, kind, asked, count, values);
    if (kind == INT64 && values)
        *(int64_t *)values = name == PLAN_WORKSPACE_SIZE ? SIMPLE_WORKSPACE_BYTES : 0;
    if (count)
        *count = kind == INT64 || kind == DESCRIPTOR;
    return 0;
}
