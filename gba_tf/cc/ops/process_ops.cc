// The op by which the chief ends the other tasks. Shapes and docs only; the kernel is in
// gba_tf/cc/kernels/process_kernels.cc.
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gba {
namespace {

REGISTER_OP("GbaRequestShutdown")
    .Input("status: int32")
    .Input("message: string")
    .SetIsStateful()
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext* c) {
      ::tensorflow::shape_inference::ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &unused));
      return c->WithRank(c->input(1), 0, &unused);
    })
    .Doc(R"doc(
Asks the process that runs this op to end. Returns at once; `gba_tf.cluster.serve` sees the request.

The first request counts; later ones change nothing.

status: Scalar, the exit code to end with: 0 when training ended, 1 when the chief failed.
message: Scalar, the reason, shown by the process that ends when the status is not 0.
)doc");

}  // namespace
}  // namespace gba
