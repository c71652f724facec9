/** @file rebatch.h
 *  Survive running out of GPU memory in a training step, with the same bits.
 *
 *  This header brings in everything but wrap.h, which puts a CUDA trainer that is there already
 *  under rebatch and needs CUDA's headers. A newcomer reads in this order:
 *  step.h (wrap the training step), probe.h (find the largest micro-batch), pool.h (allocate
 *  inside it), device.h (where memory comes from), cuda.h (GPUs), config.h (limits in a file),
 *  status.h (what can go wrong), current.h (what wrap.h is made of). */
#ifndef REBATCH_REBATCH_H
#define REBATCH_REBATCH_H

#include "rebatch/config.h"
#include "rebatch/cuda.h"
#include "rebatch/current.h"
#include "rebatch/device.h"
#include "rebatch/pool.h"
#include "rebatch/probe.h"
#include "rebatch/status.h"
#include "rebatch/step.h"
#include "rebatch/version.h"

#endif
