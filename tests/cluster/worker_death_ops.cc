// Ops of worker_death_test.py: they end a worker, and hold an update, at an exact place of a step.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <string>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/util/device_name_utils.h"

namespace {

using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;

// Whether this is the first call for this path, in any process.
bool CreateFile(const std::string& path) {
  const int file = open(path.c_str(), O_CREAT | O_EXCL | O_WRONLY, 0600);
  if (file >= 0) close(file);
  return file >= 0;
}

void WaitForFile(const std::string& path) {
  while (access(path.c_str(), F_OK) != 0) usleep(1000);
}

REGISTER_OP("GbaTestDie")
    .Input("value: T")
    .Input("armed: bool")
    .Output("same: T")
    .Attr("T: type")
    .Attr("task: int")
    .Attr("run: int")
    .Attr("wait_for: string = ''")
    .Attr("dead: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape);

// On worker `task`, at the `run`-th armed run: waits for the file `wait_for`, creates the file
// `dead` and kills the process; once, even if the worker is started again. Elsewhere: the identity.
class DieOp : public OpKernel {
 public:
  explicit DieOp(OpKernelConstruction* c) : OpKernel(c) {
    int64_t task = 0;
    OP_REQUIRES_OK(c, c->GetAttr("task", &task));
    OP_REQUIRES_OK(c, c->GetAttr("run", &run_));
    OP_REQUIRES_OK(c, c->GetAttr("wait_for", &wait_for_));
    OP_REQUIRES_OK(c, c->GetAttr("dead", &dead_));
    tensorflow::DeviceNameUtils::ParsedName name;
    tensorflow::DeviceNameUtils::ParseFullName(c->device()->name(), &name);
    here_ = name.job == "worker" && name.task == task;
  }

  void Compute(OpKernelContext* c) override {
    if (here_ && c->input(1).scalar<bool>()() && ++runs_ == run_) {
      if (!wait_for_.empty()) WaitForFile(wait_for_);
      if (CreateFile(dead_)) {
        raise(SIGKILL);
        pause();
      }
    }
    c->set_output(0, c->input(0));
  }

 private:
  bool here_;
  int64_t run_;
  std::string wait_for_;
  std::string dead_;
  std::atomic<int64_t> runs_{0};
};
REGISTER_KERNEL_BUILDER(Name("GbaTestDie").Device(tensorflow::DEVICE_CPU), DieOp);

REGISTER_OP("GbaTestHold")
    .Input("value: T")
    .Output("same: T")
    .Attr("T: type")
    .Attr("begun: string")
    .Attr("until: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape);

// The identity. At its first run it creates the file `begun`, waits for the file `until`, and gives
// the end of the process that created that some time to become known.
class HoldOp : public OpKernel {
 public:
  explicit HoldOp(OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("begun", &begun_));
    OP_REQUIRES_OK(c, c->GetAttr("until", &until_));
  }

  void Compute(OpKernelContext* c) override {
    if (CreateFile(begun_)) {
      WaitForFile(until_);
      usleep(1000 * 1000);
    }
    c->set_output(0, c->input(0));
  }

 private:
  std::string begun_;
  std::string until_;
};
REGISTER_KERNEL_BUILDER(Name("GbaTestHold").Device(tensorflow::DEVICE_CPU), HoldOp);

}  // namespace
