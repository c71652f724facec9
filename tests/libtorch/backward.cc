/* rebatch/libtorch.h on the CPU, where LibTorch is found: an OOM is thrown on purpose.
 * It knows no private header. Prints what does not hold. */
#include <rebatch/libtorch.h>

#include <cstdio>

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            (void)printf("%s:%d: %s\n", __FILE__, __LINE__, #condition);                           \
            failures++;                                                                            \
        }                                                                                          \
    } while (0)

static int failures;
static int operations; /* since the batch began */
static int fail_at;    /* the operation that runs out of memory; 0: none */
static bool for_ever;  /* and all after it */
static int64_t fits;   /* most samples that fit; 0: any */

static void operation(int64_t samples)
{
    operations++;
    if (operations == fail_at || (for_ever && operations > fail_at) || (fits && samples > fits))
        C10_THROW_ERROR(OutOfMemoryError, "out of memory on purpose");
}

/* Nothing in either direction, but memory may run out. */
struct Place : torch::autograd::Function<Place> {
    static torch::Tensor forward(torch::autograd::AutogradContext *context, torch::Tensor x)
    {
        (void)context;
        operation(x.size(0));
        return x.clone();
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext *context,
                                                   torch::autograd::variable_list gradients)
    {
        (void)context;
        operation(gradients[0].size(0));
        return gradients;
    }
};

struct Net : torch::nn::Module {
    torch::nn::Linear in = register_module("in", torch::nn::Linear(6, 16));
    torch::nn::Linear out = register_module("out", torch::nn::Linear(16, 4));
    torch::Tensor calls = register_buffer("calls", torch::zeros({}, torch::kDouble));
    torch::Tensor tied = register_parameter("tied", in->weight); /* twice in parameters() */
    double dropout = 0;

    torch::Tensor forward(torch::Tensor x)
    {
        x = Place::apply(torch::relu(in(x)));
        calls.add_(x.size(0));
        x = torch::dropout(x, dropout, true);
        return torch::log_softmax(out(Place::apply(x)), 1);
    }
};

struct Trial {
    Net net;
    torch::data::Example<> batch;
    torch::Tensor before;

    explicit Trial(double dropout = 0)
    {
        torch::manual_seed(5);
        net = Net();
        net.dropout = dropout;
        net.to(torch::kDouble);
        batch = {torch::randn({12, 6}, torch::kDouble), torch::randint(0, 4, {12})};
        before = torch::randn({4, 16}, torch::kDouble);
        net.out->weight.mutable_grad() = before;
        before = before.clone();
        operations = 0;
        fail_at = 0;
        for_ever = false;
        fits = 0;
    }
    torch::Tensor loss(torch::data::Example<> &part)
    {
        return torch::nll_loss(net.forward(part.data), part.target);
    }
    torch::Tensor run(rebatch_torch::Backward &backward)
    {
        return backward(batch, [&](auto &part) { return loss(part); });
    }
    bool is_like(Trial &other, double tolerance)
    {
        bool same = torch::equal(net.calls, other.net.calls);
        for (size_t i = 0; i < net.parameters().size(); i++)
            same = same && torch::allclose(net.parameters()[i].grad(),
                                           other.net.parameters()[i].grad(), 0, tolerance);
        return same;
    }
};

static rebatch_options quiet(size_t micro_start)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.log_level = REBATCH_LOG_QUIET;
    options.micro_start = micro_start;
    return options;
}

static void whole_batch_has_the_bits_of_a_plain_pass()
{
    Trial plain(0.5), own(0.5);
    const rebatch_options options = quiet(0);
    rebatch_torch::Backward backward(own.net, &options);
    torch::manual_seed(9);
    const torch::Tensor expected = plain.loss(plain.batch);
    expected.backward();
    torch::manual_seed(9);
    const torch::Tensor loss = own.run(backward);
    EXPECT(torch::equal(loss, expected) && !loss.requires_grad());
    EXPECT(own.is_like(plain, 0));
}

static void cut_batch_has_the_gradients_of_the_whole()
{
    Trial plain, own;
    const rebatch_options options = quiet(0);
    rebatch_torch::Backward backward(own.net, &options);
    const torch::Tensor expected = plain.loss(plain.batch);
    expected.backward();
    fits = 5;
    EXPECT(torch::allclose(own.run(backward), expected, 0, 1e-12));
    EXPECT(own.is_like(plain, 1e-12));
    EXPECT(backward.report().micro == 3 && backward.report().ooms == 2);
    own.run(backward); /* goes on at the size that fits */
    EXPECT(backward.report().ooms == 0);
}

static bool runs_out(Trial &trial, rebatch_torch::Backward &backward)
{
    try {
        trial.run(backward);
    } catch (const c10::OutOfMemoryError &) {
        return true;
    }
    return false;
}

/* Dropout draws the same numbers when samples come again. */
static void oom_at_each_operation_leaves_the_bits_of_a_run_at_that_size()
{
    const rebatch_options of_one = quiet(1), of_six = quiet(6), of_twelve = quiet(12);
    Trial ones(0.5);
    rebatch_torch::Backward smallest(ones.net, &of_one);
    ones.run(smallest);
    const int count = operations;
    EXPECT(count == 48); /* four in each of twelve micro-batches */
    for (int at = 1; at <= count; at++) {
        Trial own(0.5);
        rebatch_torch::Backward backward(own.net, &of_one);
        fail_at = at;
        own.run(backward);
        EXPECT(backward.report().ooms == 1 && own.is_like(ones, 0));
    }
    Trial sixes(0.5);
    rebatch_torch::Backward half(sixes.net, &of_six);
    sixes.run(half);
    for (int at = 1; at <= 4; at++) {
        Trial own(0.5);
        rebatch_torch::Backward backward(own.net, &of_twelve);
        fail_at = at;
        own.run(backward);
        EXPECT(backward.report().ooms == 1 && own.is_like(sixes, 0));
    }
}

static void no_memory_at_all_puts_back()
{
    const rebatch_options options = quiet(1);
    for (int at = 1; at <= 48; at++) {
        Trial own(0.5);
        rebatch_torch::Backward backward(own.net, &options);
        fail_at = at;
        for_ever = true;
        EXPECT(runs_out(own, backward));
        EXPECT(torch::equal(own.net.out->weight.grad(), own.before));
        EXPECT(!own.net.in->weight.grad().defined() && own.net.calls.item<double>() == 0);
    }
}

static void another_exception_comes_out_and_puts_back()
{
    Trial own(0.5);
    const rebatch_options options = quiet(4);
    rebatch_torch::Backward backward(own.net, &options);
    const torch::Tensor random = at::detail::getDefaultCPUGenerator().get_state();
    int parts = 0;
    try {
        backward(own.batch, [&](auto &part) {
            const torch::Tensor loss = own.loss(part);
            if (++parts == 2)
                throw std::range_error("of the program");
            return loss;
        });
        EXPECT(false);
    } catch (const std::range_error &e) {
        EXPECT(std::string(e.what()) == "of the program");
    }
    EXPECT(torch::equal(own.net.out->weight.grad(), own.before));
    EXPECT(!own.net.in->weight.grad().defined() && own.net.calls.item<double>() == 0);
    EXPECT(torch::equal(at::detail::getDefaultCPUGenerator().get_state(), random));
    own.run(backward);
    EXPECT(own.net.in->weight.grad().defined());
}

static void call_within_its_own_loss_is_refused()
{
    Trial own;
    const rebatch_options options = quiet(0);
    rebatch_torch::Backward backward(own.net, &options);
    try {
        backward(own.batch, [&](auto &) { return own.run(backward); });
        EXPECT(false);
    } catch (const c10::Error &e) {
        EXPECT(std::string(e.what()).find("within its own loss") != std::string::npos);
    }
    EXPECT(torch::equal(own.net.out->weight.grad(), own.before));
}

int main()
{
    whole_batch_has_the_bits_of_a_plain_pass();
    cut_batch_has_the_gradients_of_the_whole();
    oom_at_each_operation_leaves_the_bits_of_a_run_at_that_size();
    no_memory_at_all_puts_back();
    another_exception_comes_out_and_puts_back();
    call_within_its_own_loss_is_refused();
    (void)printf("libtorch: %s\n", failures ? "failed" : "ok");
    return failures != 0;
}
