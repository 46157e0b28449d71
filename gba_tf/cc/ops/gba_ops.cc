// [4] The ops of a training step, in the order in which a gradient meets them. Shapes and docs
// only; the kernels are in gba_tf/cc/kernels.
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gba {
namespace {

using ::tensorflow::shape_inference::DimensionHandle;
using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ScalarShape;
using ::tensorflow::shape_inference::ShapeHandle;
using ::tensorflow::shape_inference::UnchangedShape;

absl::Status ScalarInputs(InferenceContext* c, int first, int last) {
  ShapeHandle unused;
  for (int i = first; i <= last; ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 0, &unused));
  return absl::OkStatus();
}

absl::Status VectorInput(InferenceContext* c, int i) {
  ShapeHandle unused;
  return c->WithRank(c->input(i), 1, &unused);
}

REGISTER_OP("GbaTokenServer")
    .Output("token_server: resource")
    .Attr("run_id: string")
    .Attr("shared_name: string")
    .Attr("policy: {'gba', 'bsp', 'hop_bs', 'hop_bw'}")
    .Attr("gradients_per_update: int >= 1")
    .Attr("staleness_tolerance: int >= 0")
    .Attr("staleness_bound: int >= 1")
    .SetIsStateful()
    .SetShapeFn(ScalarShape)
    .Doc(R"doc(
The token server of a run, created on first use. Belongs on parameter server task 0.

Resources of another run that this process still holds are released first: a run never sees the
tokens of an earlier one.

run_id: Names the run.
shared_name: Names the token server within the run.
policy: The rule of the training mode, see gba_tf/cc/core/policy.h.
gradients_per_update: M, gradients per update. 1 for hop_bs.
staleness_tolerance: Of gba: global steps by which a gradient may be late before its weight is 0.
staleness_bound: Of hop_bs: gradients by which a worker may be ahead of the slowest one.
token_server: Scalar handle.
)doc");

REGISTER_OP("GbaGradientBuffer")
    .Output("buffer: resource")
    .Attr("run_id: string")
    .Attr("shared_name: string")
    .Attr("value_types: list({float, double, half, bfloat16}) >= 0")
    .Attr("id_types: list({int32, int64}) >= 0")
    .Attr("num_elements: list(int) >= 0")
    .Attr("num_rows: list(int) >= 0")
    .Attr("row_widths: list(int) >= 0")
    .Attr("sparse: list(bool) >= 0")
    .Attr("merge_rows: list(bool) >= 0")
    .Attr("sparse_divisor: {'gradients_per_update', 'gradients_with_row'} = 'gradients_per_update'")
    .SetIsStateful()
    .SetShapeFn(ScalarShape)
    .Doc(R"doc(
The gradient buffer of one parameter server task, created on first use.

The list attributes have one entry per variable of this task.

run_id: Names the run, see GbaTokenServer.
shared_name: Names the buffer within the run.
value_types: Gradient dtypes.
id_types: Dtypes of the row ids; ignored for dense gradients.
num_elements: Elements of a variable; used for dense gradients.
num_rows: Rows of a variable; used for sparse gradients.
row_widths: Elements of a row; used for sparse gradients.
sparse: Whether the gradient is IndexedSlices.
merge_rows: Whether the occurrences of a row are summed. If not, the update gets all of them, in
  token-id order, as an optimizer needs that clips before it merges; ignored for dense gradients.
sparse_divisor: How a row of a sparse gradient is averaged: over all M gradients, which equals
  synchronous training, or over the gradients that contain the row. Where rows are not merged, each
  of their occurrences is divided by the same number.
buffer: Scalar handle.
)doc");

REGISTER_OP("GbaWorkerIdentity")
    .Output("worker: int64")
    .Output("device: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(2));
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Tells on which worker the op runs.

worker: int64[2]: the task index, and the incarnation of the process, which changes at a restart.
device: The name of the device. Also there because TensorFlow moves an op without inputs and with one
  output to the device that uses it, here a parameter server.
)doc");

REGISTER_OP("GbaTakeToken")
    .Input("token_server: resource")
    .Input("worker: int64")
    .Output("token_id: int64")
    .Output("token_value: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(ScalarInputs(c, 0, 0));
      TF_RETURN_IF_ERROR(VectorInput(c, 1));
      c->set_output(0, c->Scalar());
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Takes a token. Must run before the worker reads parameters.

Waits, without holding a thread, where the policy says so: hop_bs for slower workers, hop_bw for the
open step to close. A cancelled step, the end of the token server, or GbaGiveUpTokens for this worker
end the wait with Cancelled. The worker counts as having work from here on, see GbaJoinWorker.

worker: int64[2] from GbaWorkerIdentity. A token that this worker still holds is lost, and a call of
  its that still waits is cancelled.
token_id: Unique within the run.
token_value: The global step at which synchronous training would use this batch.
)doc");

REGISTER_OP("GbaPackGradient")
    .Input("values: value_types")
    .Input("ids: id_types")
    .Output("block: uint8")
    .Attr("value_types: list({float, double, half, bfloat16}) >= 0")
    .Attr("id_types: list({int32, int64}) >= 0")
    .Attr("num_rows: list(int) >= 0")
    .Attr("sparse: list(bool) >= 0")
    .Attr("merge_rows: list(bool) >= 0")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Packs the gradients of one parameter server's variables into one block, so that they travel as one
message.

values: One tensor per variable: the dense gradient, or the values of IndexedSlices
  [number of ids, ...].
ids: One int vector per sparse gradient, in order: the rows, each in [0, num_rows).
num_rows: Rows of each variable; ignored for dense gradients.
sparse: Whether each gradient is sparse.
merge_rows: Whether repeated rows are summed. If not, ids and values are packed as they are, and the
  buffer must have the same merge_rows; ignored for dense gradients.
block: uint8 vector, see gba_tf/cc/core/packed_gradient.h.
)doc");

REGISTER_OP("GbaPushGradient")
    .Input("buffer: resource")
    .Input("token_id: int64")
    .Input("block: uint8")
    .Output("pushed_id: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(ScalarInputs(c, 0, 1));
      TF_RETURN_IF_ERROR(VectorInput(c, 2));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Stores a gradient under its token. It counts once the token is committed.

block: From GbaPackGradient.
pushed_id: token_id, once the gradient is stored.
)doc");

REGISTER_OP("GbaCommitToken")
    .Input("token_server: resource")
    .Input("pushed_ids: num_parameter_servers * int64")
    .Output("decision: int64")
    .Attr("num_parameter_servers: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(ScalarInputs(c, 0, c->num_inputs() - 1));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Commits a gradient that is complete on every parameter server. Never waits.

pushed_ids: The token's id, from the push to each parameter server.
decision: int64 vector for GbaApplyUpdate and GbaMarkApplied, see gba_tf/cc/kernels/decision.h: the
  closed global steps that the caller has to apply, mostly none.
)doc");

REGISTER_OP("GbaApplyUpdate")
    .Input("buffer: resource")
    .Input("decision: int64")
    .Input("shared_state: string")
    .Input("captured: captured_types")
    .Output("shared_state_out: string")
    .Attr("update: func")
    .Attr("captured_types: list(type) >= 0")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(ScalarInputs(c, 0, 0));
      TF_RETURN_IF_ERROR(VectorInput(c, 1));
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 2, &unused));
      c->set_output(0, c->Matrix(InferenceContext::kUnknownDim, InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Applies the closed steps of a decision to the variables of this parameter server: in order, each
exactly once, whoever asks and however often.

Runs `update` on this task alone and to its end, even if the worker that asked for it dies. Other
updates of this buffer wait meanwhile, without holding a thread.

decision: From GbaCommitToken or GbaFlush.
shared_state: string[steps of the decision, s]: the serialized state that all parameter servers share
  (iterations, learning rate, ...) as it was before each step; s is 0 on the task that owns it.
captured: What `update` captures: variable handles of this task.
shared_state_out: The same for the other tasks; empty where this task does not own the state or where
  nobody needs it any more.
update: Takes the gradients (dense: flat values [num_elements]; sparse: ids [rows], which repeat
  where rows are not merged, then values [rows, row_width]) of every variable, then s serialized
  tensors, then `captured`. Returns the serialized shared state, one string scalar each.
)doc");

REGISTER_OP("GbaInspectUpdate")
    .Input("buffer: resource")
    .Input("decision: int64")
    .Output("findings: string")
    .Attr("inspection: func")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(ScalarInputs(c, 0, 0));
      TF_RETURN_IF_ERROR(VectorInput(c, 1));
      c->set_output(0, c->Matrix(InferenceContext::kUnknownDim, InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Evaluates a function of the aggregated gradients of the closed steps, for updates that need to know
something of all parameter servers' gradients, such as a global norm. Changes nothing.

decision: From GbaCommitToken or GbaFlush.
findings: string[steps of the decision, f]: what `inspection` returned for each step; the first
  answer for a step is kept until every task has applied it.
inspection: Takes the gradients as `update` of GbaApplyUpdate does, and captures nothing. Returns f
  string scalars.
)doc");

REGISTER_OP("GbaMarkApplied")
    .Input("token_server: resource")
    .Input("decision: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(ScalarInputs(c, 0, 0));
      return VectorInput(c, 1);
    })
    .Doc(R"doc(
Reports that every parameter server has applied the steps of a decision.
)doc");

REGISTER_OP("GbaFlush")
    .Input("token_server: resource")
    .Output("decision: int64")
    .Attr("close_partial: bool = true")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(ScalarInputs(c, 0, 0));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Hands out every closed step that is not applied yet.

close_partial: Whether to close the open step first, with the gradients that are there, divided by
  their own number.
)doc");

REGISTER_OP("GbaJoinWorker")
    .Input("token_server: resource")
    .Input("worker_task: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return ScalarInputs(c, 0, 1); })
    .Doc(R"doc(
Says that a worker has work, so that others may have to wait for it. It starts no lower than the
slowest busy worker.

worker_task: Task index of the worker.
)doc");

REGISTER_OP("GbaLeaveWorker")
    .Input("token_server: resource")
    .Input("worker_task: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return ScalarInputs(c, 0, 1); })
    .Doc(R"doc(
Says that a worker has no work for now: nobody waits for it until it joins or takes a token.

worker_task: Task index of the worker.
)doc");

REGISTER_OP("GbaGiveUpTokens")
    .Input("token_server: resource")
    .Input("worker_task: int64")
    .Output("lost_ids: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(ScalarInputs(c, 0, 1));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Gives up what a dead worker holds: its token is lost, its unfinished updates go to the next committer,
its own wait for a token is cancelled, and nobody waits for it any more.

worker_task: Task index of the worker.
lost_ids: int64 vector for GbaDropGradients.
)doc");

REGISTER_OP("GbaDropGradients")
    .Input("buffer: resource")
    .Input("lost_ids: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(ScalarInputs(c, 0, 0));
      return VectorInput(c, 1);
    })
    .Doc(R"doc(
Frees the gradients of lost tokens. Ids that are not here are ignored.
)doc");

REGISTER_OP("GbaTokenStats")
    .Input("token_server: resource")
    .Output("counts: int64")
    .Output("staleness: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(ScalarInputs(c, 0, 0));
      c->set_output(0, c->Vector(9));
      c->set_output(1, c->Matrix(InferenceContext::kUnknownDim, 2));
      return absl::OkStatus();
    })
    .Doc(R"doc(
One consistent reading of the counts.

counts: int64[9]: issued, applied, decayed, lost, outstanding, buffered, global step, closed steps
  that are not applied yet, workers that wait for a token.
staleness: int64[n, 2]: (staleness in global steps, number of gradients), ascending.
)doc");

REGISTER_OP("GbaWorkerSeconds")
    .Input("token_server: resource")
    .Output("tasks: int64")
    .Output("gradients: int64")
    .Output("seconds: double")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(ScalarInputs(c, 0, 0));
      const ShapeHandle vector = c->Vector(c->UnknownDim());
      for (int i = 0; i < 3; ++i) c->set_output(i, vector);
      return absl::OkStatus();
    })
    .Doc(R"doc(
How long the gradients of each worker took, from the hand-over of the token to its commit.

tasks: int64[n], ascending: the task indices of the workers that have committed.
gradients: int64[n]: the gradients they committed, late ones included.
seconds: double[n]: the sum of the seconds that those took.
)doc");

REGISTER_OP("GbaBufferStats")
    .Input("buffer: resource")
    .Output("counts: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(ScalarInputs(c, 0, 0));
      c->set_output(0, c->Vector(3));
      return absl::OkStatus();
    })
    .Doc(R"doc(
counts: int64[3]: gradients held, their bytes, global steps applied here.
)doc");

REGISTER_OP("GbaSerializeTokenServer")
    .Input("token_server: resource")
    .Output("state: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(ScalarInputs(c, 0, 0));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
The token server's state for a checkpoint. Outstanding tokens are saved as lost.
)doc");

REGISTER_OP("GbaRestoreTokenServer")
    .Input("token_server: resource")
    .Input("state: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return ScalarInputs(c, 0, 1); })
    .Doc(R"doc(
Replaces the token server's state. Fails, changing nothing, if `state` is damaged or of another
policy or M.
)doc");

REGISTER_OP("GbaSerializeBuffer")
    .Input("buffer: resource")
    .Output("token_ids: int64")
    .Output("blocks: string")
    .Output("applied_steps: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(ScalarInputs(c, 0, 0));
      DimensionHandle n = c->UnknownDim();
      c->set_output(0, c->Vector(n));
      c->set_output(1, c->Vector(n));
      c->set_output(2, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
The gradients that a buffer holds, for a checkpoint.

token_ids: int64[n].
blocks: string[n], the packed gradients.
applied_steps: Scalar: the global steps applied here.
)doc");

REGISTER_OP("GbaRestoreBuffer")
    .Input("buffer: resource")
    .Input("token_ids: int64")
    .Input("blocks: string")
    .Input("applied_steps: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(ScalarInputs(c, 0, 0));
      TF_RETURN_IF_ERROR(VectorInput(c, 1));
      TF_RETURN_IF_ERROR(VectorInput(c, 2));
      return ScalarInputs(c, 3, 3);
    })
    .Doc(R"doc(
Replaces the content of a buffer. Fails, changing nothing, if a block does not fit the variables.
)doc");

}  // namespace
}  // namespace gba
