// Ops that take time, for tests, demos and benchmarks, and that measure it. Shapes and docs only;
// the kernels are in gba_tf/cc/kernels/timing_kernels.cc.
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gba {
namespace {

using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

absl::Status ScalarInput(InferenceContext* c, int i) {
  ShapeHandle unused;
  return c->WithRank(c->input(i), 0, &unused);
}

REGISTER_OP("GbaSleep")
    .Input("value: T")
    .Input("seconds: double")
    .Output("same: T")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(ScalarInput(c, 1));
      return tensorflow::shape_inference::UnchangedShape(c);
    })
    .Doc(R"doc(
Passes a value on after a while. Holds no thread meanwhile; a cancelled step ends the wait.

seconds: Scalar, finite and at least 0.
same: `value`.
)doc");

REGISTER_OP("GbaRecordStepSeconds")
    .Input("seconds: double")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return ScalarInput(c, 0); })
    .Doc(R"doc(
Adds one step to the step times of the process that runs this op.

seconds: Scalar, finite and at least 0.
)doc");

REGISTER_OP("GbaStepSeconds")
    .Output("count: int64")
    .Output("seconds: double")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reads the step times of the process that runs this op.

count: Scalar, the steps recorded by GbaRecordStepSeconds since the process began.
seconds: Scalar, the sum of their times.
)doc");

}  // namespace
}  // namespace gba
