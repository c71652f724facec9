/* Owns what cuDNN says of recurrent layers: how large their weights, reserve and workspace are, and
 * where each weight lies. Descriptors are cuDNN's own, which needs no GPU for them.
 * Must not know graphs. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

#include "standin.h"

namespace
{

enum { LSTM = 2, GRU = 3 }; /* of cudnnRNNMode_t */
enum { DATA_FLOAT = 0, DATA_DOUBLE = 1, UNIDIRECTIONAL = 0, NO_BIAS = 0, DOUBLE_BIAS = 2 };
constexpr int BAD_PARAM = 2000; /* CUDNN_STATUS_BAD_PARAM */

/* A function of cuDNN that is no function of the stand-in. */
template <typename function> function *own(const char *name)
{
    void *library = dlopen("libcudnn.so.9", RTLD_LAZY | RTLD_NOLOAD);
    return library ? (function *)dlsym(library, name) : nullptr;
}

/* What a descriptor of a layer says. */
struct layer {
    int algorithm = 0, cell = 0, bias = 0, direction = 0, input_mode = 0;
    int type = 0, precision = 0, math = 0;
    int32_t inputs = 0, hidden = 0, projected = 0, layers = 0;
    void *dropout = nullptr;
    uint32_t flags = 0;

    explicit layer(void *descriptor)
    {
        using get = int(void *, int *, int *, int *, int *, int *, int *, int *, int *, int32_t *,
                        int32_t *, int32_t *, int32_t *, void **, uint32_t *);
        static get *const f = own<get>("cudnnGetRNNDescriptor_v8");
        if (f)
            (void)f(descriptor, &algorithm, &cell, &bias, &direction, &input_mode, &type,
                    &precision, &math, &inputs, &hidden, &projected, &layers, &dropout, &flags);
    }

    int gates() const
    {
        return cell == LSTM ? 4 : cell == GRU ? 3 : 1;
    }
    int directions() const
    {
        return direction == UNIDIRECTIONAL ? 1 : 2;
    }
    size_t element() const
    {
        return type == DATA_FLOAT ? 4 : type == DATA_DOUBLE ? 8 : 2;
    }
    int64_t outputs() const
    {
        return projected && projected != hidden ? projected : hidden;
    }
    bool has_projection() const
    {
        return outputs() != hidden;
    }
    int biases() const
    {
        return bias == NO_BIAS ? 0 : bias == DOUBLE_BIAS ? 2 : 1;
    }

    /* Columns of the matrix of a gate: those of the input first, then the recurrent ones. */
    int64_t columns(int pseudo_layer, bool is_recurrent) const
    {
        if (is_recurrent)
            return outputs();
        return pseudo_layer < directions() ? inputs : outputs() * directions();
    }

    int64_t matrices(int pseudo_layer) const /* elements */
    {
        const int64_t rows = (int64_t)gates() * hidden;
        return rows * (columns(pseudo_layer, false) + columns(pseudo_layer, true)) +
               (has_projection() ? outputs() * hidden : 0);
    }

    int64_t all_matrices(int before) const
    {
        int64_t sum = 0;
        for (int i = 0; i < before; i++)
            sum += matrices(i);
        return sum;
    }

    int pseudo_layers() const
    {
        return layers * directions();
    }
    int64_t biases_of_layer() const
    {
        return (int64_t)biases() * gates() * hidden;
    }
};

/* What a descriptor of a batch says. */
struct batch {
    int type = 0, layout = 0, length = 0, samples = 0, width = 0;

    explicit batch(void *descriptor)
    {
        using get = int(void *, int *, int *, int *, int *, int *, int, int *, void *);
        static get *const f = own<get>("cudnnGetRNNDataDescriptor");
        double fill;
        if (f)
            (void)f(descriptor, &type, &layout, &length, &samples, &width, 0, nullptr, &fill);
    }
};

void describe(void *descriptor, int type, int64_t rows, int64_t columns)
{
    using set = int(void *, int, int, const int *, const int *);
    static set *const f = own<set>("cudnnSetTensorNdDescriptor");
    const int sizes[] = {1, (int)rows, (int)columns};
    const int strides[] = {(int)(rows * columns), (int)columns, 1};
    if (f)
        (void)f(descriptor, type, 3, sizes, strides);
}

} // namespace

STANDIN_API int cudnnGetRNNWeightSpaceSize(void *, void *descriptor, size_t *bytes)
{
    const layer l(descriptor);
    const int count = l.pseudo_layers();
    *bytes = (size_t)(l.all_matrices(count) + count * l.biases_of_layer()) * l.element();
    return count ? 0 : BAD_PARAM;
}

/* The matrices of all layers lie before the biases of all layers. A caller asks for a matrix, a
 * bias or both. */
STANDIN_API int cudnnGetRNNWeightParams(void *, void *descriptor, int pseudo_layer, size_t,
                                        const void *weights, int linear, void *matrix_descriptor,
                                        void **matrix, void *bias_descriptor, void **bias)
{
    const layer l(descriptor);
    const int gates = l.gates();
    const bool is_projection = linear == 2 * gates, is_recurrent = linear >= gates;
    const bool has_matrix = !is_projection || l.has_projection();
    const bool has_bias = !is_projection && l.biases() > 0;
    if (matrix) {
        const int64_t of_inputs = (int64_t)l.hidden * l.columns(pseudo_layer, false);
        const int64_t of_outputs = (int64_t)l.hidden * l.columns(pseudo_layer, true);
        const int64_t at =
            l.all_matrices(pseudo_layer) +
            (is_recurrent ? gates * of_inputs + (linear - gates) * of_outputs : linear * of_inputs);
        *matrix = has_matrix ? (char *)weights + at * (int64_t)l.element() : nullptr;
        describe(matrix_descriptor, l.type, is_projection ? l.outputs() : l.hidden,
                 is_projection ? l.hidden : l.columns(pseudo_layer, is_recurrent));
    }
    if (bias) {
        const int64_t at = l.all_matrices(l.pseudo_layers()) + pseudo_layer * l.biases_of_layer() +
                           (int64_t)linear * l.hidden;
        *bias = has_bias ? (char *)weights + at * (int64_t)l.element() : nullptr;
        describe(bias_descriptor, l.type, l.hidden, 1);
    }
    return 0;
}

/* Estimates, by a training of three layers of LSTM on an H100: each layer keeps its gates and its
 * cell's state of each step, and all but the last their outputs; a backward pass works on the gates
 * of two layers. */
STANDIN_API int cudnnGetRNNTempSpaceSizes(void *, void *descriptor, int, void *data,
                                          size_t *workspace, size_t *reserve)
{
    const layer l(descriptor);
    const batch b(data);
    const size_t state = (size_t)b.length * (size_t)b.samples * (size_t)l.hidden * l.element();
    const size_t count = (size_t)l.pseudo_layers(), gates = (size_t)l.gates();
    const size_t directions = (size_t)l.directions();
    if (reserve)
        *reserve = state * (count * (gates + 2) - directions);
    if (workspace)
        *workspace = state * gates * (count < 2 * directions ? count : 2 * directions);
    return 0;
}
