// [5] Tensors <-> token server.
#include "absl/strings/str_cat.h"
#include "gba_tf/cc/core/token_server.h"
#include "gba_tf/cc/kernels/decision.h"
#include "gba_tf/cc/kernels/resources.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/refcount.h"
#include "tensorflow/core/util/device_name_utils.h"

namespace gba {
namespace {

using ::tensorflow::AsyncOpKernel;
using ::tensorflow::CancellationManager;
using ::tensorflow::CancellationToken;
using ::tensorflow::DEVICE_CPU;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;
using ::tensorflow::tstring;
using ::tensorflow::core::RefCountPtr;
using ::tensorflow::core::WeakPtr;

absl::Status OutputInt64Vector(OpKernelContext* c, int index, const std::vector<int64_t>& values) {
  Tensor* output = nullptr;
  TF_RETURN_IF_ERROR(
      c->allocate_output(index, TensorShape({static_cast<int64_t>(values.size())}), &output));
  std::copy(values.begin(), values.end(), output->flat<int64_t>().data());
  return absl::OkStatus();
}

absl::Status OutputInt64Scalar(OpKernelContext* c, int index, int64_t value) {
  Tensor* output = nullptr;
  TF_RETURN_IF_ERROR(c->allocate_output(index, TensorShape({}), &output));
  output->scalar<int64_t>()() = value;
  return absl::OkStatus();
}

// Reads an int64 scalar and says what it is when it is not one.
absl::Status ScalarInput(OpKernelContext* c, int index, const char* what, int64_t* value) {
  const Tensor& tensor = c->input(index);
  if (tensor.dims() != 0) {
    return tensorflow::errors::InvalidArgument(
        "Expected ", what, " to be an int64 scalar, found shape ", tensor.shape().DebugString());
  }
  *value = tensor.scalar<int64_t>()();
  return absl::OkStatus();
}

class TokenServerOp : public OpKernel {
 public:
  explicit TokenServerOp(OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("run_id", &run_id_));
    OP_REQUIRES_OK(c, c->GetAttr("shared_name", &shared_name_));
    OP_REQUIRES_OK(c, c->GetAttr("policy", &settings_.name));
    OP_REQUIRES_OK(c, c->GetAttr("gradients_per_update", &settings_.gradients_per_update));
    OP_REQUIRES_OK(c, c->GetAttr("staleness_tolerance", &settings_.staleness_tolerance));
    OP_REQUIRES_OK(c, c->GetAttr("staleness_bound", &settings_.staleness_bound));
    std::unique_ptr<const Policy> policy;
    OP_REQUIRES_OK(c, ToAbsl(MakePolicy(settings_, &policy)));
    description_ = policy->Describe();
  }

  void Compute(OpKernelContext* c) override {
    const std::string container = EnterRun(c->resource_manager(), run_id_);
    TokenServerResource* found = nullptr;
    OP_REQUIRES_OK(c, c->resource_manager()->LookupOrCreate<TokenServerResource>(
                          container, shared_name_, &found, [this](TokenServerResource** created) {
                            std::unique_ptr<const Policy> policy;
                            TF_RETURN_IF_ERROR(ToAbsl(MakePolicy(settings_, &policy)));
                            *created = new TokenServerResource(std::move(policy));
                            return absl::OkStatus();
                          }));
    RefCountPtr<TokenServerResource> resource(found);
    OP_REQUIRES(c, resource->server().policy().Describe() == description_,
                tensorflow::errors::InvalidArgument(
                    "Expected token server ", shared_name_, " to be of policy ", description_,
                    ", found a ", resource->DebugString(), ". Use another shared_name."));
    Tensor* handle = nullptr;
    OP_REQUIRES_OK(c, c->allocate_output(0, TensorShape({}), &handle));
    handle->scalar<tensorflow::ResourceHandle>()() =
        tensorflow::MakeResourceHandle<TokenServerResource>(c, container, shared_name_);
  }

 private:
  std::string run_id_;
  std::string shared_name_;
  PolicySettings settings_;
  std::string description_;
};
REGISTER_KERNEL_BUILDER(Name("GbaTokenServer").Device(DEVICE_CPU), TokenServerOp);

class WorkerIdentityOp : public OpKernel {
 public:
  explicit WorkerIdentityOp(OpKernelConstruction* c) : OpKernel(c) {
    tensorflow::DeviceNameUtils::ParsedName name;
    OP_REQUIRES(c, tensorflow::DeviceNameUtils::ParseFullName(c->device()->name(), &name),
                tensorflow::errors::Internal("Expected a device name of the form "
                                             "/job:worker/replica:0/task:0/device:CPU:0, found ",
                                             c->device()->name()));
    // A step that the chief runs itself would take the token of the worker with its index.
    OP_REQUIRES(
        c, name.job == "worker" || name.job == "localhost",
        tensorflow::errors::FailedPrecondition(
            "Expected a training step to run on a worker, found it on ", c->device()->name(),
            ". Send it there: ClusterCoordinator.schedule(step), or Model.fit."));
    identity_ = {static_cast<int64_t>(name.task),
                 static_cast<int64_t>(c->device()->attributes().incarnation())};
  }

  void Compute(OpKernelContext* c) override {
    OP_REQUIRES_OK(c, OutputInt64Vector(c, 0, identity_));
    Tensor* device = nullptr;
    OP_REQUIRES_OK(c, c->allocate_output(1, TensorShape({}), &device));
    device->scalar<tstring>()() = c->device()->name();
  }

 private:
  std::vector<int64_t> identity_;
};
REGISTER_KERNEL_BUILDER(Name("GbaWorkerIdentity").Device(DEVICE_CPU), WorkerIdentityOp);

// Holds no thread while it waits, and no reference to the token server: the server's end, when a
// newer run takes the process over, is one of the things that end the wait.
class TakeTokenOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* c, DoneCallback done) override {
    RefCountPtr<TokenServerResource> resource;
    OP_REQUIRES_OK_ASYNC(c, LookupGbaResource(c, 0, &resource), done);
    const Tensor& worker = c->input(1);
    OP_REQUIRES_ASYNC(c, worker.dims() == 1 && worker.NumElements() == 2,
                      tensorflow::errors::InvalidArgument(
                          "Expected worker to be int64[2] from GbaWorkerIdentity, found shape ",
                          worker.shape().DebugString()),
                      done);
    const auto identity = worker.vec<int64_t>();
    CancellationManager* const manager = c->cancellation_manager();
    // Of the wait, if there is one. Written before the wait can end.
    auto cancellation = std::make_shared<CancellationToken>(CancellationManager::kInvalidToken);

    const auto end = [c, done, manager, cancellation](const Status& status, const Token& token) {
      // Not the blocking one: this may be the cancellation. Then its callback finds nothing to end.
      if (*cancellation != CancellationManager::kInvalidToken) {
        manager->TryDeregisterCallback(*cancellation);
      }
      OP_REQUIRES_OK_ASYNC(c, ToAbsl(status), done);
      OP_REQUIRES_OK_ASYNC(c, OutputInt64Scalar(c, 0, token.id), done);
      OP_REQUIRES_OK_ASYNC(c, OutputInt64Scalar(c, 1, token.value), done);
      done();
    };
    const auto may_wait = [manager, cancellation, server = resource.get()](int64_t ticket) {
      if (manager == nullptr) return true;
      *cancellation = manager->get_cancellation_token();
      return manager->RegisterCallback(*cancellation,
                                       [ticket, weak = WeakPtr<TokenServerResource>(server)] {
                                         RefCountPtr<TokenServerResource> alive = weak.GetNewRef();
                                         if (alive != nullptr) alive->server().CancelTake(ticket);
                                       });
    };
    resource->server().Take({identity(0), identity(1)}, end, may_wait);
  }
};
REGISTER_KERNEL_BUILDER(Name("GbaTakeToken").Device(DEVICE_CPU), TakeTokenOp);

class CommitTokenOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* c) override {
    RefCountPtr<TokenServerResource> resource;
    OP_REQUIRES_OK(c, LookupGbaResource(c, 0, &resource));
    int64_t id = 0;
    OP_REQUIRES_OK(c, ScalarInput(c, 1, "pushed_ids[0]", &id));
    for (int i = 2; i < c->num_inputs(); ++i) {
      int64_t other = 0;
      OP_REQUIRES_OK(c, ScalarInput(c, i, "pushed_ids", &other));
      OP_REQUIRES(
          c, other == id,
          tensorflow::errors::InvalidArgument(
              "Expected the same token from every parameter server, found ", id, " and ", other));
    }
    CommitOutcome outcome;
    OP_REQUIRES_OK(c, ToAbsl(resource->server().Commit(id, &outcome)));
    OP_REQUIRES_OK(c, OutputInt64Vector(c, 0, EncodeDecision(outcome)));
  }
};
REGISTER_KERNEL_BUILDER(Name("GbaCommitToken").Device(DEVICE_CPU), CommitTokenOp);

class MarkAppliedOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* c) override {
    RefCountPtr<TokenServerResource> resource;
    OP_REQUIRES_OK(c, LookupGbaResource(c, 0, &resource));
    Decision decision;
    OP_REQUIRES_OK(c, DecodeDecision(c->input(1), &decision));
    if (decision.steps.empty()) return;
    OP_REQUIRES_OK(c, ToAbsl(resource->server().MarkApplied(decision.steps.back().step)));
  }
};
REGISTER_KERNEL_BUILDER(Name("GbaMarkApplied").Device(DEVICE_CPU), MarkAppliedOp);

class FlushOp : public OpKernel {
 public:
  explicit FlushOp(OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("close_partial", &close_partial_));
  }

  void Compute(OpKernelContext* c) override {
    RefCountPtr<TokenServerResource> resource;
    OP_REQUIRES_OK(c, LookupGbaResource(c, 0, &resource));
    OP_REQUIRES_OK(
        c, OutputInt64Vector(c, 0, EncodeDecision(resource->server().Flush(close_partial_))));
  }

 private:
  bool close_partial_;
};
REGISTER_KERNEL_BUILDER(Name("GbaFlush").Device(DEVICE_CPU), FlushOp);

// Tells the token server whether a worker has work.
template <void (TokenServer::*kCall)(int64_t)>
class BusyOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* c) override {
    RefCountPtr<TokenServerResource> resource;
    OP_REQUIRES_OK(c, LookupGbaResource(c, 0, &resource));
    int64_t task = 0;
    OP_REQUIRES_OK(c, ScalarInput(c, 1, "worker_task", &task));
    (resource->server().*kCall)(task);
  }
};
REGISTER_KERNEL_BUILDER(Name("GbaJoinWorker").Device(DEVICE_CPU), BusyOp<&TokenServer::Join>);
REGISTER_KERNEL_BUILDER(Name("GbaLeaveWorker").Device(DEVICE_CPU), BusyOp<&TokenServer::Leave>);

class GiveUpTokensOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* c) override {
    RefCountPtr<TokenServerResource> resource;
    OP_REQUIRES_OK(c, LookupGbaResource(c, 0, &resource));
    int64_t task = 0;
    OP_REQUIRES_OK(c, ScalarInput(c, 1, "worker_task", &task));
    OP_REQUIRES_OK(c, OutputInt64Vector(c, 0, resource->server().GiveUp(task)));
  }
};
REGISTER_KERNEL_BUILDER(Name("GbaGiveUpTokens").Device(DEVICE_CPU), GiveUpTokensOp);

class TokenStatsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* c) override {
    RefCountPtr<TokenServerResource> resource;
    OP_REQUIRES_OK(c, LookupGbaResource(c, 0, &resource));
    const TokenStats stats = resource->server().stats();
    OP_REQUIRES_OK(c, OutputInt64Vector(c, 0,
                                        {stats.issued, stats.applied, stats.decayed, stats.lost,
                                         stats.outstanding, stats.buffered, stats.global_step,
                                         stats.unapplied_steps, stats.waiting}));
    Tensor* staleness = nullptr;
    OP_REQUIRES_OK(
        c, c->allocate_output(1, TensorShape({static_cast<int64_t>(stats.staleness.size()), 2}),
                              &staleness));
    auto rows = staleness->matrix<int64_t>();
    int64_t row = 0;
    for (const auto& [value, count] : stats.staleness) {
      rows(row, 0) = value;
      rows(row, 1) = count;
      ++row;
    }
  }
};
REGISTER_KERNEL_BUILDER(Name("GbaTokenStats").Device(DEVICE_CPU), TokenStatsOp);

class WorkerSecondsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* c) override {
    RefCountPtr<TokenServerResource> resource;
    OP_REQUIRES_OK(c, LookupGbaResource(c, 0, &resource));
    const std::vector<WorkerSeconds> workers = resource->server().worker_seconds();
    std::vector<int64_t> tasks, gradients;
    for (const WorkerSeconds& worker : workers) {
      tasks.push_back(worker.task);
      gradients.push_back(worker.gradients);
    }
    OP_REQUIRES_OK(c, OutputInt64Vector(c, 0, tasks));
    OP_REQUIRES_OK(c, OutputInt64Vector(c, 1, gradients));
    Tensor* seconds = nullptr;
    OP_REQUIRES_OK(
        c, c->allocate_output(2, TensorShape({static_cast<int64_t>(workers.size())}), &seconds));
    auto values = seconds->vec<double>();
    for (size_t i = 0; i < workers.size(); ++i) {
      values(static_cast<int64_t>(i)) = workers[i].seconds;
    }
  }
};
REGISTER_KERNEL_BUILDER(Name("GbaWorkerSeconds").Device(DEVICE_CPU), WorkerSecondsOp);

class SerializeTokenServerOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* c) override {
    RefCountPtr<TokenServerResource> resource;
    OP_REQUIRES_OK(c, LookupGbaResource(c, 0, &resource));
    Tensor* state = nullptr;
    OP_REQUIRES_OK(c, c->allocate_output(0, TensorShape({}), &state));
    state->scalar<tstring>()() = resource->server().Serialize();
  }
};
REGISTER_KERNEL_BUILDER(Name("GbaSerializeTokenServer").Device(DEVICE_CPU), SerializeTokenServerOp);

class RestoreTokenServerOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* c) override {
    RefCountPtr<TokenServerResource> resource;
    OP_REQUIRES_OK(c, LookupGbaResource(c, 0, &resource));
    OP_REQUIRES(c, c->input(1).dims() == 0,
                tensorflow::errors::InvalidArgument("Expected state to be a string scalar, found ",
                                                    "shape ", c->input(1).shape().DebugString()));
    const tstring& state = c->input(1).scalar<tstring>()();
    OP_REQUIRES_OK(c, ToAbsl(resource->server().Restore(std::string(state))));
  }
};
REGISTER_KERNEL_BUILDER(Name("GbaRestoreTokenServer").Device(DEVICE_CPU), RestoreTokenServerOp);

}  // namespace
}  // namespace gba
