// [5] A closed global step -> the optimizer's update function, on this parameter server alone.
//
// The update runs here rather than in the worker that closed the step because it must happen
// exactly once: the worker may die at any moment, and the runtime then cancels what it had started.
#include <memory>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "gba_tf/cc/core/gradient_buffer.h"
#include "gba_tf/cc/kernels/decision.h"
#include "gba_tf/cc/kernels/layout.h"
#include "gba_tf/cc/kernels/resources.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/errors.h"

namespace gba {
namespace {

using ::tensorflow::AsyncOpKernel;
using ::tensorflow::CancellationManager;
using ::tensorflow::DEVICE_CPU;
using ::tensorflow::FunctionLibraryRuntime;
using ::tensorflow::NameAttrList;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;
using ::tensorflow::tstring;
using ::tensorflow::core::RefCountPtr;

// Runs a function of the aggregated gradients for each step of a decision that needs it, one after
// the other. Holds itself alive through its callbacks.
class StepsJob : public std::enable_shared_from_this<StepsJob> {
 public:
  enum class Kind { kApply, kInspect };

  StepsJob(Kind kind, OpKernelContext* context, FunctionLibraryRuntime* library,
           FunctionLibraryRuntime::Handle function, RefCountPtr<GradientBufferResource> resource,
           Decision decision, AsyncOpKernel::DoneCallback done)
      : kind_(kind),
        context_(context),
        library_(library),
        function_(function),
        resource_(std::move(resource)),
        decision_(std::move(decision)),
        done_(std::move(done)) {}

  // Called inside a job of the resource's queue.
  void Start() {
    // Earlier steps are applied everywhere: a commit hands out all steps that are not.
    records().erase(records().begin(), records().lower_bound(decision_.steps.front().step));
    RunFrom(0);
  }

 private:
  GradientBufferResource::Records& records() {
    return kind_ == Kind::kApply ? resource_->shared_state() : resource_->findings();
  }

  bool IsDone(GlobalStep step) {
    if (step < resource_->applied_steps()) return true;
    return kind_ == Kind::kInspect && records().count(step) > 0;
  }

  void RunFrom(size_t index) {
    while (index < decision_.steps.size() && IsDone(decision_.steps[index].step)) ++index;
    if (index == decision_.steps.size()) return Finish(OutputRecords());
    std::vector<Tensor> arguments;
    const absl::Status status = CollectArguments(index, &arguments);
    if (!status.ok()) return Finish(status);

    FunctionLibraryRuntime::Options options;
    // Deliberately not the step's own cancellation manager: an update that was started is finished.
    options.cancellation_manager = &cancellation_;
    options.create_rendezvous = true;
    options.runner = context_->runner();
    options.step_container = context_->step_container();
    auto results = std::make_shared<std::vector<Tensor>>();
    library_->Run(options, function_, arguments, results.get(),
                  [self = shared_from_this(), index, results](const absl::Status& run_status) {
                    if (!run_status.ok()) return self->Fail(index, run_status);
                    self->Record(index, *results);
                    self->RunFrom(index + 1);
                  });
  }

  // An update that failed half-way must not be run again: part of it would be applied twice.
  void Fail(size_t index, const absl::Status& status) {
    if (kind_ == Kind::kApply) {
      resource_->set_failure(tensorflow::errors::FailedPrecondition(
          "The update of global step ", decision_.steps[index].step, " failed on ",
          context_->device()->name(),
          " and may have changed some of its variables. Expected no further update; restart "
          "training from a checkpoint. The failure was: ",
          status.message()));
    }
    Finish(status);
  }

  void Record(size_t index, const std::vector<Tensor>& results) {
    const ClosedStep& step = decision_.steps[index];
    std::vector<tstring>& record = records()[step.step];
    record.clear();
    for (const Tensor& result : results) record.push_back(result.scalar<tstring>()());
    if (kind_ == Kind::kInspect) return;
    resource_->set_applied_steps(step.step + 1);
    resource_->buffer().Release(step, decision_.oldest_live_id,
                                {decision_.steps.begin() + index + 1, decision_.steps.end()});
  }

  // The gradients of a step; for an update also the shared state before it, and what it captures.
  absl::Status CollectArguments(size_t index, std::vector<Tensor>* arguments) {
    const ClosedStep& step = decision_.steps[index];
    TF_RETURN_IF_ERROR(resource_->failure());
    if (kind_ == Kind::kApply && step.step != resource_->applied_steps()) {
      return tensorflow::errors::FailedPrecondition(
          "Expected global step ", resource_->applied_steps(), " to be applied next on ",
          context_->device()->name(), ", found step ", step.step,
          ". The token server and this gradient buffer are not of the same checkpoint.");
    }
    TF_RETURN_IF_ERROR(CollectGradients(step, arguments));
    return kind_ == Kind::kApply ? CollectSharedState(index, arguments) : absl::OkStatus();
  }

  absl::Status CollectGradients(const ClosedStep& step, std::vector<Tensor>* arguments) {
    PreparedUpdate update;
    TF_RETURN_IF_ERROR(ToAbsl(resource_->buffer().Prepare(step, &update)));
    const std::vector<VariableLayout>& layout = resource_->layout();
    for (size_t i = 0; i < layout.size(); ++i) {
      Tensor values;
      if (!layout[i].sparse) {
        TF_RETURN_IF_ERROR(context_->allocate_temp(ToDataType(layout[i].value_type),
                                                   TensorShape({layout[i].num_elements}), &values));
        update.WriteDense(i, values.data());
        arguments->push_back(std::move(values));
        continue;
      }
      const int64_t rows = update.num_rows(i);
      Tensor ids;
      TF_RETURN_IF_ERROR(
          context_->allocate_temp(ToDataType(layout[i].id_type), TensorShape({rows}), &ids));
      TF_RETURN_IF_ERROR(context_->allocate_temp(
          ToDataType(layout[i].value_type), TensorShape({rows, layout[i].row_width}), &values));
      update.WriteSparse(i, ids.data(), values.data());
      arguments->push_back(std::move(ids));
      arguments->push_back(std::move(values));
    }
    return absl::OkStatus();
  }

  absl::Status CollectSharedState(size_t index, std::vector<Tensor>* arguments) {
    const Tensor& shared = context_->input(2);
    const int64_t num_shared = shared.dim_size(1);
    if (num_shared > 0 && shared.dim_size(0) != static_cast<int64_t>(decision_.steps.size())) {
      return tensorflow::errors::InvalidArgument("Expected shared_state of ",
                                                 decision_.steps.size(), " steps, found shape ",
                                                 shared.shape().DebugString());
    }
    for (int64_t j = 0; j < num_shared; ++j) {
      Tensor state(tensorflow::DT_STRING, TensorShape({}));
      state.scalar<tstring>()() = shared.matrix<tstring>()(index, j);
      arguments->push_back(std::move(state));
    }
    for (int i = 3; i < context_->num_inputs(); ++i) arguments->push_back(context_->input(i));
    return absl::OkStatus();
  }

  absl::Status OutputRecords() {
    size_t width = 0;
    for (const auto& [step, record] : records()) width = std::max(width, record.size());
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(context_->allocate_output(
        0, TensorShape({static_cast<int64_t>(decision_.steps.size()), static_cast<int64_t>(width)}),
        &output));
    auto rows = output->matrix<tstring>();
    for (size_t i = 0; i < decision_.steps.size(); ++i) {
      // A record that is gone belongs to a step that every task has applied.
      const auto found = records().find(decision_.steps[i].step);
      if (found == records().end()) continue;
      for (size_t j = 0; j < found->second.size(); ++j) rows(i, j) = found->second[j];
    }
    return absl::OkStatus();
  }

  void Finish(const absl::Status& status) {
    if (!status.ok()) context_->SetStatus(status);
    // The step's runner does not outlive done_, so the next job gets its thread first.
    const auto runner = *context_->runner();
    const RefCountPtr<GradientBufferResource> resource = std::move(resource_);
    const AsyncOpKernel::DoneCallback done = std::move(done_);
    resource->updates().Done(runner);
    done();
  }

  const Kind kind_;
  OpKernelContext* const context_;
  FunctionLibraryRuntime* const library_;
  const FunctionLibraryRuntime::Handle function_;
  RefCountPtr<GradientBufferResource> resource_;
  const Decision decision_;
  AsyncOpKernel::DoneCallback done_;
  CancellationManager cancellation_;
};

class StepsOp : public AsyncOpKernel {
 public:
  StepsOp(OpKernelConstruction* c, StepsJob::Kind kind, const char* function_attribute)
      : AsyncOpKernel(c), kind_(kind) {
    OP_REQUIRES_OK(c, c->GetAttr(function_attribute, &function_));
  }

  void ComputeAsync(OpKernelContext* c, DoneCallback done) override {
    Decision decision;
    OP_REQUIRES_OK_ASYNC(c, DecodeDecision(c->input(1), &decision), done);
    OP_REQUIRES_ASYNC(
        c, kind_ == StepsJob::Kind::kInspect || c->input(2).dims() == 2,
        tensorflow::errors::InvalidArgument("Expected shared_state to be a matrix, found shape ",
                                            c->input(2).shape().DebugString()),
        done);
    if (decision.steps.empty()) {
      Tensor* output = nullptr;
      OP_REQUIRES_OK_ASYNC(c, c->allocate_output(0, TensorShape({0, 0}), &output), done);
      return done();
    }
    RefCountPtr<GradientBufferResource> resource;
    OP_REQUIRES_OK_ASYNC(c, LookupGbaResource(c, 0, &resource), done);
    FunctionLibraryRuntime* library = c->function_library();
    OP_REQUIRES_ASYNC(c, library != nullptr,
                      tensorflow::errors::Internal("No function library on this device."), done);
    FunctionLibraryRuntime::Handle handle;
    OP_REQUIRES_OK_ASYNC(c, Instantiate(library, &handle), done);

    GradientBufferResource* buffer = resource.get();
    auto job = std::make_shared<StepsJob>(kind_, c, library, handle, std::move(resource),
                                          std::move(decision), std::move(done));
    buffer->updates().Enqueue([job] { job->Start(); });
  }

 private:
  absl::Status Instantiate(FunctionLibraryRuntime* library,
                           FunctionLibraryRuntime::Handle* handle) {
    absl::MutexLock lock(&mu_);
    if (handle_ == tensorflow::kInvalidHandle) {
      TF_RETURN_IF_ERROR(library->Instantiate(function_.name(),
                                              tensorflow::AttrSlice(&function_.attr()), &handle_));
    }
    *handle = handle_;
    return absl::OkStatus();
  }

  const StepsJob::Kind kind_;
  NameAttrList function_;
  absl::Mutex mu_;
  FunctionLibraryRuntime::Handle handle_ ABSL_GUARDED_BY(mu_) = tensorflow::kInvalidHandle;
};

class ApplyUpdateOp : public StepsOp {
 public:
  explicit ApplyUpdateOp(OpKernelConstruction* c) : StepsOp(c, StepsJob::Kind::kApply, "update") {}
};
REGISTER_KERNEL_BUILDER(Name("GbaApplyUpdate").Device(DEVICE_CPU), ApplyUpdateOp);

class InspectUpdateOp : public StepsOp {
 public:
  explicit InspectUpdateOp(OpKernelConstruction* c)
      : StepsOp(c, StepsJob::Kind::kInspect, "inspection") {}
};
REGISTER_KERNEL_BUILDER(Name("GbaInspectUpdate").Device(DEVICE_CPU), InspectUpdateOp);

}  // namespace
}  // namespace gba
