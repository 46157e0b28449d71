#include <atomic>
#include <cmath>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "gba_tf/cc/core/timer.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/errors.h"

namespace gba {
namespace {

using ::tensorflow::AsyncOpKernel;
using ::tensorflow::CancellationManager;
using ::tensorflow::CancellationToken;
using ::tensorflow::DEVICE_CPU;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

absl::Status SecondsInput(OpKernelContext* c, int index, double* seconds) {
  const Tensor& tensor = c->input(index);
  if (tensor.dims() != 0) {
    return tensorflow::errors::InvalidArgument("seconds: expected a scalar, found shape ",
                                               tensor.shape().DebugString());
  }
  *seconds = tensor.scalar<double>()();
  if (!std::isfinite(*seconds) || *seconds < 0) {
    return tensorflow::errors::InvalidArgument("seconds: expected at least 0 and finite, found ",
                                               *seconds);
  }
  return absl::OkStatus();
}

// Never destroyed, for kernels may still wait while static objects are.
Timer& ProcessTimer() {
  static Timer* timer = new Timer;
  return *timer;
}

class SleepOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* c, DoneCallback done) override {
    double seconds = 0;
    OP_REQUIRES_OK_ASYNC(c, SecondsInput(c, 1, &seconds), done);
    // The first of the two, timer and cancellation, ends the call; the other must not touch `c`.
    auto ended = std::make_shared<std::atomic<bool>>(false);
    CancellationManager* const manager = c->cancellation_manager();
    CancellationToken cancellation = CancellationManager::kInvalidToken;
    if (manager != nullptr) {
      cancellation = manager->get_cancellation_token();
      const bool registered = manager->RegisterCallback(cancellation, [c, done, ended] {
        if (ended->exchange(true)) return;
        c->SetStatus(absl::CancelledError("The step was cancelled while it slept."));
        done();
      });
      OP_REQUIRES_ASYNC(c, registered,
                        absl::CancelledError("The step was cancelled before it could sleep."),
                        done);
    }
    ProcessTimer().After(seconds, [c, done, ended, manager, cancellation] {
      if (ended->exchange(true)) return;
      // Not the blocking one: the cancellation may be calling, and finds nothing to end.
      if (manager != nullptr) manager->TryDeregisterCallback(cancellation);
      c->set_output(0, c->input(0));
      done();
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("GbaSleep").Device(DEVICE_CPU), SleepOp);

// Of the process, as the shutdown request is: whoever measures and whoever reads share no resource.
struct StepTimes {
  absl::Mutex mu;
  int64_t count ABSL_GUARDED_BY(mu) = 0;
  double seconds ABSL_GUARDED_BY(mu) = 0;
};

StepTimes& Times() {
  static StepTimes* times = new StepTimes;
  return *times;
}

class RecordStepSecondsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* c) override {
    double seconds = 0;
    OP_REQUIRES_OK(c, SecondsInput(c, 0, &seconds));
    StepTimes& times = Times();
    absl::MutexLock lock(&times.mu);
    ++times.count;
    times.seconds += seconds;
  }
};
REGISTER_KERNEL_BUILDER(Name("GbaRecordStepSeconds").Device(DEVICE_CPU), RecordStepSecondsOp);

class StepSecondsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* c) override {
    Tensor *count = nullptr, *seconds = nullptr;
    OP_REQUIRES_OK(c, c->allocate_output(0, TensorShape({}), &count));
    OP_REQUIRES_OK(c, c->allocate_output(1, TensorShape({}), &seconds));
    StepTimes& times = Times();
    absl::MutexLock lock(&times.mu);
    count->scalar<int64_t>()() = times.count;
    seconds->scalar<double>()() = times.seconds;
  }
};
REGISTER_KERNEL_BUILDER(Name("GbaStepSeconds").Device(DEVICE_CPU), StepSecondsOp);

}  // namespace
}  // namespace gba
