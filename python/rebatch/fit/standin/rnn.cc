/* Owns what cuDNN says of recurrent layers: how large weights, reserve, workspace and the state of
 * dropout are, and where each weight lies. Descriptors are cuDNN's own, which needs no GPU for it.
 * Must not know graphs. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "standin.h"

using namespace standin;

namespace
{

enum { LSTM = 2, GRU = 3 };                  /* of cudnnRNNMode_t */
enum { TRAINING = 1, SEQ_MAJOR_PACKED = 1 }; /* cudnnForwardMode_t, cudnnRNNDataLayout_t */
enum { DATA_FLOAT = 0, DATA_DOUBLE = 1, DATA_HALF = 2 }; /* cudnnDataType_t */
enum { UNIDIRECTIONAL = 0, NO_BIAS = 0, DOUBLE_BIAS = 2 };
constexpr int BAD_PARAM = 2000; /* CUDNN_STATUS_BAD_PARAM */
constexpr size_t PROCESSOR_STATE_BYTES = 49152;
constexpr int64_t ALIGNMENT = 256, PSEUDO_LAYER_BYTES = 8 << 20;
constexpr int32_t SMALL = 128; /* hidden units; between 128 and 256 nothing was measured */

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
    int64_t words = 0; /* the sum of the samples' lengths */

    explicit batch(void *descriptor)
    {
        using get = int(void *, int *, int *, int *, int *, int *, int, int *, void *);
        static get *const f = own<get>("cudnnGetRNNDataDescriptor");
        double fill;
        if (!f || f(descriptor, &type, &layout, &length, &samples, &width, 0, nullptr, &fill))
            return;
        std::vector<int> lengths((size_t)samples);
        (void)f(descriptor, &type, &layout, &length, &samples, &width, samples, lengths.data(),
                &fill);
        for (int l : lengths)
            words += l;
    }
};

/* What the descriptors of dropout were set to: cuDNN's own functions for it need a GPU. */
struct dropouts {
    std::mutex mutex;
    std::unordered_map<void *, float> of;
};

dropouts &the_dropouts(void)
{
    static dropouts &d = *new dropouts;
    return d;
}

int set_dropout(void *descriptor, float dropout)
{
    std::lock_guard<std::mutex> lock(the_dropouts().mutex);
    the_dropouts().of[descriptor] = dropout;
    return 0;
}

bool has_dropout_between(const layer &l)
{
    std::lock_guard<std::mutex> lock(the_dropouts().mutex);
    const auto found = the_dropouts().of.find(l.dropout);
    return l.layers > 1 && found != the_dropouts().of.end() && found->second > 0;
}

void describe(void *descriptor, int type, int64_t rows, int64_t columns)
{
    using set = int(void *, int, int, const int *, const int *);
    static set *const f = own<set>("cudnnSetTensorNdDescriptor");
    const int sizes[] = {1, (int)rows, (int)columns};
    const int strides[] = {(int)(rows * columns), (int)columns, 1};
    if (f)
        (void)f(descriptor, type, 3, sizes, strides);
}

/* Each layer keeps its gates, states and outputs of each word, but for the last outputs, and a bit
 * of dropout's mask for each output of all layers but the last, of padding too. */
int64_t reserve_of(const layer &l, const batch &b)
{
    const int64_t kept = l.cell == LSTM ? 6 : l.cell == GRU ? 7 : 2, directions = l.directions();
    const int64_t of_word = kept * l.hidden + (l.has_projection() ? l.hidden + l.outputs() : 0);
    const int64_t words = b.words * (l.pseudo_layers() * of_word - directions * l.hidden);
    const int64_t masks = (l.layers - 1) * directions * directions;
    return words * (int64_t)l.element() + ALIGNMENT +
           (has_dropout_between(l) ? masks * b.samples * b.length * l.outputs() / 8 : 0);
}

/* Inputs, outputs and states of sequences with padding, which are packed into the workspace;
 * elements. A backward pass has their gradients too. */
int64_t packed_of(const layer &l, const batch &b)
{
    const int64_t states = l.outputs() + (l.cell == LSTM ? l.hidden : 0);
    return 2 * states * l.pseudo_layers() * b.samples +
           (l.directions() * l.outputs() + l.inputs) * b.words;
}

/* Elements beside the weights and what is packed: states of each sample, and of each word the gates
 * of a layer, projected outputs, those of two directions, or those that dropout has changed. */
int64_t forward_of(const layer &l, const batch &b)
{
    const int64_t directions = l.directions(), both = directions == 2, gates = l.gates();
    const int64_t of_layer = gates + (l.cell == LSTM ? 2 : 0) + 2 * both;
    const int64_t extra = both ? 4 : has_dropout_between(l);
    const int64_t projected = l.has_projection() ? 2 * directions * l.outputs() : 0;
    return l.hidden * of_layer * l.pseudo_layers() * b.samples +
           ((directions * gates + extra) * l.hidden + projected) * b.words;
}

/* The same of a backward pass: gradients of inputs and outputs instead of gates. */
int64_t backward_of(const layer &l, const batch &b)
{
    const int64_t hidden = l.hidden, inputs = l.inputs, many = l.layers > 1;
    const int64_t wide = many && hidden > inputs ? hidden : inputs; /* inputs of any layer */
    const bool both = l.directions() == 2;
    const int64_t of_layer = (l.cell == LSTM ? 3 : 1) + (both ? 2 : 4 * many);
    const int64_t of_sample = of_layer * l.pseudo_layers() + (both ? 0 : 8 * many);
    const int64_t projected = l.has_projection() ? 2 * l.directions() * l.outputs() : 0;
    const int64_t of_word = both ? 4 * (hidden + wide) : many ? wide : hidden + 2 * wide;
    return hidden * of_sample * b.samples + (of_word + projected) * b.words;
}

/* A backward pass over padding that takes other kernels: an upper bound of what was measured. */
int64_t persistent_of(const layer &l, const batch &b)
{
    const bool is_single = l.type == DATA_HALF && l.pseudo_layers() == 1 && l.cell != GRU;
    if (l.has_projection() || !(l.hidden <= SMALL || is_single))
        return 0;
    return (l.gates() == 1 ? 9 : 16) * (int64_t)l.hidden * b.words;
}

int64_t workspace_of(const layer &l, const batch &b, bool is_training)
{
    const bool unpacked = b.layout != SEQ_MAJOR_PACKED;
    const int64_t packed = unpacked ? packed_of(l, b) : 0;
    int64_t elements = forward_of(l, b) + packed;
    if (is_training)
        elements = std::max(elements, backward_of(l, b) + 2 * packed) +
                   (unpacked ? persistent_of(l, b) : 0);
    elements += l.all_matrices(l.pseudo_layers());
    return elements * (int64_t)l.element() + l.pseudo_layers() * PSEUDO_LAYER_BYTES +
           (unpacked ? 2 : 1) * ALIGNMENT;
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

/* A generator's state for each thread that a GPU can run; an H200's is 6,488,064 bytes. */
STANDIN_API int cudnnDropoutGetStatesSize(void *, size_t *bytes)
{
    int processors = 0;
    (void)attribute(&processors, cudaDevAttrMultiProcessorCount, current_gpu());
    *bytes = (size_t)processors * PROCESSOR_STATE_BYTES;
    return processors ? 0 : BAD_PARAM;
}

STANDIN_API int cudnnSetDropoutDescriptor(void *descriptor, void *, float dropout, void *, size_t,
                                          unsigned long long)
{
    return set_dropout(descriptor, dropout);
}

STANDIN_API int cudnnRestoreDropoutDescriptor(void *descriptor, void *, float dropout, void *,
                                              size_t, unsigned long long)
{
    return set_dropout(descriptor, dropout);
}

/* Fitted to 708 layers of cuDNN 9.19 on an H200 (docs/fit.md). */
STANDIN_API int cudnnGetRNNTempSpaceSizes(void *, void *descriptor, int mode, void *data,
                                          size_t *workspace, size_t *reserve)
{
    const layer l(descriptor);
    const batch b(data);
    if (reserve)
        *reserve = mode == TRAINING ? (size_t)reserve_of(l, b) : 0;
    if (workspace)
        *workspace = (size_t)workspace_of(l, b, mode == TRAINING);
    return 0;
}
