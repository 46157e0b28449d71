#include <cstdint>
#include <string>

#include "absl/base/const_init.h"
#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/tstring.h"

namespace gba {
namespace {

using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShapeUtils;
using ::tensorflow::tstring;

// Of the process, not of a resource manager: it is the process that ends. Never destroyed, for a
// kernel may still run while static objects are.
struct ShutdownRequest {
  absl::Mutex mu;
  bool requested ABSL_GUARDED_BY(mu) = false;
  int32_t status ABSL_GUARDED_BY(mu) = 0;
  std::string message ABSL_GUARDED_BY(mu);
};

ShutdownRequest& Request() {
  static ShutdownRequest* request = new ShutdownRequest;
  return *request;
}

class RequestShutdownOp : public OpKernel {
 public:
  explicit RequestShutdownOp(OpKernelConstruction* context) : OpKernel(context) {}

  void Compute(OpKernelContext* context) override {
    const Tensor& status = context->input(0);
    const Tensor& message = context->input(1);
    OP_REQUIRES(
        context,
        TensorShapeUtils::IsScalar(status.shape()) && TensorShapeUtils::IsScalar(message.shape()),
        tensorflow::errors::InvalidArgument(
            "GbaRequestShutdown: expected a scalar status and a scalar message, found "
            "shapes ",
            status.shape().DebugString(), " and ", message.shape().DebugString()));
    ShutdownRequest& request = Request();
    absl::MutexLock lock(&request.mu);
    if (request.requested) return;
    request.requested = true;
    request.status = status.scalar<int32_t>()();
    request.message = std::string(message.scalar<tstring>()());
  }
};

REGISTER_KERNEL_BUILDER(Name("GbaRequestShutdown").Device(tensorflow::DEVICE_CPU),
                        RequestShutdownOp);

}  // namespace
}  // namespace gba

extern "C" {

// Whether this process was asked to end. Never blocks for longer than a copy of the message.
// When it was, `*status` is the exit code and `*message` the reason; the text lives as long as the
// process, because only the first request is kept.
__attribute__((visibility("default"))) bool GbaShutdownRequested(int32_t* status,
                                                                 const char** message) {
  gba::ShutdownRequest& request = gba::Request();
  absl::MutexLock lock(&request.mu);
  if (!request.requested) return false;
  *status = request.status;
  *message = request.message.c_str();
  return true;
}

}  // extern "C"
