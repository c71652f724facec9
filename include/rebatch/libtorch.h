/** @file libtorch.h
 *  The gradients of a batch in micro-batches that fit, for C++ programs with LibTorch.
 *
 *  @code
 *  rebatch_torch::Backward backward(*model);      // once
 *  for (auto &batch : *loader) {
 *      optimizer.zero_grad();
 *      auto loss = backward(batch, [&](auto &part) {
 *          return torch::nll_loss(model->forward(part.data.to(device)), part.target.to(device));
 *      });                                        // stood here: loss = ...; loss.backward();
 *      optimizer.step();
 *  }
 *  @endcode
 *
 *  The allocator of LibTorch is not rebatch's: rebatch knows that memory ran out from
 *  c10::OutOfMemoryError alone. It does not see how much memory there is: nothing is predicted,
 *  `learn` and rebatch_probe() do not work, and memory for the first update is not kept free. Other
 *  exceptions of a full device, such as those of cuBLAS, come out unchanged. */
#ifndef REBATCH_LIBTORCH_H
#define REBATCH_LIBTORCH_H

#include <torch/torch.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "rebatch/rebatch.h"

namespace rebatch_torch
{

/** @cond internal */
inline torch::Tensor slice(const torch::Tensor &t, int64_t first, int64_t count)
{
    return t.narrow(0, first, count);
}

inline std::vector<torch::Tensor> slice(std::vector<torch::Tensor> all, int64_t first,
                                        int64_t count)
{
    for (torch::Tensor &t : all)
        t = slice(t, first, count);
    return all;
}

inline torch::data::Example<> slice(const torch::data::Example<> &all, int64_t first, int64_t count)
{
    return {slice(all.data, first, count), slice(all.target, first, count)};
}

inline int64_t samples(const torch::Tensor &t)
{
    return t.size(0);
}

inline int64_t samples(const std::vector<torch::Tensor> &all)
{
    return all.at(0).size(0);
}

inline int64_t samples(const torch::data::Example<> &all)
{
    return all.data.size(0);
}
/** @endcond */

/** Runs batches forward and backward, and survives running out of memory. One thread at a time uses
 *  it. It calls neither zero_grad() nor the optimizer. */
class Backward
{
  public:
    /** @param model    borrowed; its buffers, such as running statistics, change in place
     *  @param options  copied; NULL: those of rebatch_open() without options. reclaim is off */
    explicit Backward(torch::nn::Module &model, const rebatch_options *options = nullptr)
        : model_(model)
    {
        rebatch_options own = REBATCH_OPTIONS_INIT;
        const rebatch_guard_ops guard = {sizeof guard, save, restore};
        own.environment = REBATCH_ON;
        if (options)
            own = *options;
        own.reclaim = REBATCH_OFF; /* LibTorch counts references */
        rebatch_status status = rebatch_device_open_host(&device_, REBATCH_UNLIMITED, nullptr);
        if (!status)
            status = rebatch_open(&rb_, device_, &own);
        if (!status)
            status = rebatch_guard_with(rb_, &guard, this);
        const std::string why = rebatch_last_error();
        if (status)
            close();
        TORCH_CHECK(!status, why);
    }
    ~Backward()
    {
        close();
    }
    Backward(const Backward &) = delete;
    Backward &operator=(const Backward &) = delete;

    /** Add the gradients of a batch to those of the model, as loss.backward() of the whole batch
     *  does. After an exception gradients, buffers and generators are as before.
     *  @param batch  a tensor, a vector of tensors, or a torch::data::Example<>, with the samples
     *                in the first dimension
     *  @param loss   loss(part) -> the mean loss over the samples of `part`, which has the type of
     *                `batch`
     *  @return the loss of the batch, detached. Throws c10::OutOfMemoryError when not even the
     *          smallest micro-batch fits; an exception of `loss` comes out unchanged */
    template <class Batch, class Loss> torch::Tensor operator()(const Batch &batch, Loss &&loss)
    {
        begin();
        run_ = [&](const rebatch_microbatch &mb) {
            Batch part = slice(batch, (int64_t)mb.first, (int64_t)mb.count);
            return loss(part);
        };
        rebatch_step_ops ops = REBATCH_STEP_OPS_INIT;
        ops.zero_grad = zero_grad;
        ops.forward_backward = forward_backward;
        ops.optimizer_step = optimizer_step;
        ops.flags = REBATCH_DECLARES_MUTATION;
        const rebatch_status status =
            rebatch_step(rb_, &ops, (size_t)samples(batch), this, &report_);
        end(status);
        return std::exchange(loss_, torch::Tensor());
    }

    /** What the last batch needed.
     *  @return valid until the next batch */
    const rebatch_step_report &report() const
    {
        return report_;
    }

  private:
    /** @cond internal */
    struct Gradient {
        torch::Tensor parameter, before, sum;
    };
    struct State {
        torch::Tensor buffer, kept[2];
    };
    struct Random {
        at::Generator generator;
        torch::Tensor kept[2];
    };

    torch::nn::Module &model_;
    rebatch_device *device_ = nullptr;
    rebatch *rb_ = nullptr;
    std::function<torch::Tensor(const rebatch_microbatch &)> run_;
    std::vector<Gradient> gradients_;
    std::vector<State> states_;
    std::vector<Random> random_;
    torch::Tensor loss_;
    std::exception_ptr thrown_;
    rebatch_step_report report_ = {};

    void close()
    {
        rebatch_close(rb_);
        rebatch_device_close(device_);
    }

    /* Of the model as it is now: it may have moved to another device. */
    void begin()
    {
        std::vector<at::Device> devices = {at::kCPU};
        std::unordered_set<const void *> seen; /* parameters() has a shared one twice */
        torch::NoGradGuard no_graph;
        TORCH_CHECK(!run_, "rebatch: a Backward was called within its own loss: expected another "
                           "rebatch_torch::Backward there");
        gradients_.clear();
        states_.clear();
        random_.clear();
        for (const torch::Tensor &p : model_.parameters()) {
            if (!seen.insert(p.unsafeGetTensorImpl()).second)
                continue;
            gradients_.push_back({p, p.grad(), torch::Tensor()});
            if (std::find(devices.begin(), devices.end(), p.device()) == devices.end())
                devices.push_back(p.device());
        }
        for (const torch::Tensor &b : model_.buffers())
            states_.push_back({b, {b.clone(), b.clone()}});
        for (const at::Device &device : devices)
            random_.push_back({at::globalContext().defaultGenerator(device), {}});
    }

    void end(rebatch_status status)
    {
        const std::exception_ptr thrown = std::exchange(thrown_, nullptr);
        const std::vector<Gradient> gradients = std::exchange(gradients_, {});
        run_ = nullptr;
        states_.clear();
        for (const Gradient &g : gradients)
            g.parameter.mutable_grad() = g.before;
        if (status)
            loss_.reset();
        if (thrown)
            std::rethrow_exception(thrown);
        TORCH_CHECK_WITH(OutOfMemoryError, status != REBATCH_E_EXHAUSTED, rebatch_last_error());
        TORCH_CHECK(!status, rebatch_last_error());
        for (const Gradient &g : gradients) /* it may fail for sparse gradients: .grad is whole */
            if (g.sum.defined() && g.before.defined())
                g.sum.add_(g.before);
        for (const Gradient &g : gradients)
            if (g.sum.defined())
                g.parameter.mutable_grad() = g.sum;
    }

    /* Runs a function; an exception becomes a status. */
    template <class Function> rebatch_status guarded(Function &&function)
    {
        try {
            torch::AutoGradMode with_graph(true);
            function();
            return REBATCH_OK;
        } catch (const c10::OutOfMemoryError &e) {
            rebatch_explain(rb_, e.what_without_backtrace());
            return REBATCH_OOM;
        } catch (...) {
            thrown_ = std::current_exception();
            return REBATCH_E_USER;
        }
    }

    /* A micro-batch's gradients are apart until all are there, so an OOM costs it alone. */
    void add(const rebatch_microbatch &mb)
    {
        for (const Gradient &g : gradients_)
            g.parameter.mutable_grad().reset();
        torch::Tensor loss = run_(mb);
        if (mb.count != mb.batch)
            loss = loss * ((double)mb.count / (double)mb.batch);
        loss.backward();
        loss = loss_.defined() ? loss_ + loss.detach() : loss.detach();
        torch::NoGradGuard no_graph;
        rebatch_mutating(rb_);
        for (Gradient &g : gradients_)
            if (!g.sum.defined())
                g.sum = g.parameter.grad();
            else if (g.parameter.grad().defined())
                g.sum.add_(g.parameter.grad());
        for (const Gradient &g : gradients_)
            g.parameter.mutable_grad().reset();
        loss_ = loss;
    }

    static rebatch_status zero_grad(void *user)
    {
        Backward &b = *static_cast<Backward *>(user);
        for (Gradient &g : b.gradients_)
            g.sum.reset();
        b.loss_.reset();
        return REBATCH_OK;
    }
    static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
    {
        Backward &b = *static_cast<Backward *>(user);
        return b.guarded([&] { b.add(*mb); });
    }
    static rebatch_status optimizer_step(void *user)
    {
        rebatch_mutating(static_cast<Backward *>(user)->rb_); /* the program updates */
        return REBATCH_OK;
    }

    static rebatch_status save(rebatch_guard_point point, void *user)
    {
        return static_cast<Backward *>(user)->keep(point, false);
    }
    static rebatch_status restore(rebatch_guard_point point, void *user)
    {
        return static_cast<Backward *>(user)->keep(point, true);
    }
    rebatch_status keep(rebatch_guard_point point, bool back)
    {
        const rebatch_status status = guarded([&] {
            torch::NoGradGuard no_graph;
            for (State &s : states_)
                back ? s.buffer.copy_(s.kept[point]) : s.kept[point].copy_(s.buffer);
            for (Random &r : random_) {
                std::lock_guard<std::mutex> lock(r.generator.mutex());
                if (back)
                    r.generator.set_state(r.kept[point]);
                else
                    r.kept[point] = r.generator.get_state();
            }
        });
        return status == REBATCH_OOM ? REBATCH_E_DEVICE : status;
    }
    /** @endcond */
};

} // namespace rebatch_torch
#endif
