/** @file rebatch.h
 *  Training steps that survive running out of GPU memory.
 *
 *  rebatch cuts the effective batch of a training step into micro-batches that fit. When one runs
 *  out of memory, it takes back what the failed attempt allocated and runs the same samples again
 *  in smaller micro-batches. The update is the same, bit for bit.
 *
 *  Compile and link with the flags of pkg-config:
 *  @code
 *  cc train.c $(pkg-config --cflags --libs rebatch)
 *  @endcode
 *
 *  A training step consists of three callbacks: zero_grad clears the gradients, forward_backward
 *  accumulates the gradients of some samples, and optimizer_step applies the update. The last two
 *  call rebatch_mutating() where they begin to change gradients or parameters:
 *  @code
 *  #include <rebatch/rebatch.h>
 *  #include <stdio.h>
 *
 *  static rebatch *rb;
 *  static double w, gradient;                        // fits w in y = 3 x
 *
 *  static rebatch_status zero_grad(void *user)
 *  {
 *      (void)user;
 *      gradient = 0;
 *      return REBATCH_OK;
 *  }
 *
 *  static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
 *  {
 *      void *activations;                            // 1 MiB for each sample
 *      (void)user;
 *      if (rebatch_pool_alloc(&activations, mb->pool, mb->count << 20, mb->stream, 0))
 *          return REBATCH_OOM;                       // the samples run again, fewer at a time
 *      rebatch_mutating(rb);                         // the gradient changes from here on
 *      for (size_t i = mb->first; i < mb->first + mb->count; i++)
 *          gradient += (w - 3) * (double)(i * i) / (double)mb->batch;
 *      return rebatch_pool_free(mb->pool, activations);
 *  }
 *
 *  static rebatch_status optimizer_step(void *user)
 *  {
 *      (void)user;
 *      rebatch_mutating(rb);
 *      w -= 5e-4 * gradient;
 *      return REBATCH_OK;
 *  }
 *
 *  int main(void)
 *  {
 *      rebatch_step_ops ops = REBATCH_STEP_OPS_INIT;
 *      rebatch_step_report report;
 *      rebatch_device *device;
 *      ops.zero_grad = zero_grad;
 *      ops.forward_backward = forward_backward;
 *      ops.optimizer_step = optimizer_step;
 *      ops.flags = REBATCH_DECLARES_MUTATION;
 *      if (rebatch_device_open_host(&device, 24 << 20, NULL) || rebatch_open(&rb, device, NULL) ||
 *          rebatch_step(rb, &ops, 64, NULL, &report)) {
 *          fprintf(stderr, "%s\n", rebatch_last_error());
 *          return 1;
 *      }
 *      printf("micro-batches of %zu samples\n", report.micro_after);
 *      rebatch_close(rb);
 *      rebatch_device_close(device);
 *      return 0;
 *  }
 *  @endcode
 *
 *  rebatch.h includes all headers except those that need headers of others: wrap.h, which runs an
 *  existing CUDA trainer with rebatch, and mpi.h and nccl.h, by which several ranks vote. Read them
 *  in this order: step.h (the training step), step_in_place.h (the same in the program's loop),
 *  probe.h (the largest micro-batch), pool.h (the allocator), arena.h (memory of CUDA graphs),
 *  sharing.h (memory for others), device.h (devices), cuda.h (GPUs), config.h (settings in a file),
 *  status.h (errors), group.h (several ranks), current.h (the base of wrap.h).
 *
 *  These rules apply to all functions:
 *  - A function that can fail returns a rebatch_status. Outputs come first, and are NULL or 0 on
 *    failure. A failed call changes nothing, except where its description says so.
 *  - A pointer that must not be NULL, and is, gives REBATCH_E_INVALID.
 *  - Options structs begin with struct_size. Their macro, for example REBATCH_OPTIONS_INIT, sets
 *    it, and zero means default in all other members. The library accepts the shorter structs of
 *    programs compiled with older headers.
 *  - "Owned by the caller" means that the caller releases the object; "borrowed" means that the
 *    caller keeps the object valid for as long as the description says.
 *  - "Thread-safe" means that several threads may call the function at the same time. */
#ifndef REBATCH_REBATCH_H
#define REBATCH_REBATCH_H

#include "rebatch/arena.h"
#include "rebatch/check.h"
#include "rebatch/config.h"
#include "rebatch/cuda.h"
#include "rebatch/current.h"
#include "rebatch/device.h"
#include "rebatch/group.h"
#include "rebatch/pool.h"
#include "rebatch/probe.h"
#include "rebatch/sharing.h"
#include "rebatch/status.h"
#include "rebatch/step.h"
#include "rebatch/step_in_place.h"
#include "rebatch/version.h"

#endif
