// The core's objects as TensorFlow resources of a parameter server task.
#ifndef GBA_TF_CC_KERNELS_RESOURCES_H_
#define GBA_TF_CC_KERNELS_RESOURCES_H_

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "gba_tf/cc/core/gradient_buffer.h"
#include "gba_tf/cc/core/token_server.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/platform/tstring.h"

namespace gba {

absl::Status ToAbsl(const Status& status);

// Serialises jobs without holding a thread: a job runs at once if the queue is idle, else when the
// jobs before it have called Done.
class JobQueue {
 public:
  using Job = std::function<void()>;

  // Never waits: runs `job` in this thread or keeps it for the thread that calls Done.
  void Enqueue(Job job);
  // Ends the running job and starts the next one, if any, through `runner`.
  void Done(const std::function<void(Job)>& runner);

 private:
  absl::Mutex mu_;
  bool busy_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<Job> waiting_ ABSL_GUARDED_BY(mu_);
};

class TokenServerResource : public tensorflow::ResourceBase {
 public:
  explicit TokenServerResource(std::unique_ptr<const Policy> policy);

  std::string DebugString() const override;
  TokenServer& server() { return server_; }

 private:
  TokenServer server_;
};

class GradientBufferResource : public tensorflow::ResourceBase {
 public:
  GradientBufferResource(std::vector<VariableLayout> layout, SparseDivisor sparse_divisor);

  std::string DebugString() const override;
  GradientBuffer& buffer() { return buffer_; }
  const std::vector<VariableLayout>& layout() const { return layout_; }
  SparseDivisor sparse_divisor() const { return sparse_divisor_; }

  // The members below are used inside jobs of this queue only; applied_steps() may be read
  // anywhere.
  JobQueue& updates() { return updates_; }
  // Global steps that have been applied to the variables of this task.
  int64_t applied_steps() const { return applied_steps_.load(); }
  void set_applied_steps(int64_t steps) { applied_steps_.store(steps); }
  // Why no further update may run here; ok if nothing failed.
  const absl::Status& failure() const { return failure_; }
  void set_failure(absl::Status failure) { failure_ = std::move(failure); }
  // What other tasks may still have to know of a step: the shared state before it, and what an
  // inspection found.
  using Records = std::map<GlobalStep, std::vector<tensorflow::tstring>>;
  Records& shared_state() { return shared_state_; }
  Records& findings() { return findings_; }
  // Goes back, or on, to a saved state: replaces the gradients and forgets all else. An error,
  // after which nothing has changed, if a gradient does not fit.
  absl::Status Restore(std::vector<std::pair<TokenId, Block>> gradients, int64_t applied_steps);

 private:
  const std::vector<VariableLayout> layout_;
  const SparseDivisor sparse_divisor_;
  GradientBuffer buffer_;
  JobQueue updates_;
  std::atomic<int64_t> applied_steps_{0};
  absl::Status failure_;
  Records shared_state_;
  Records findings_;
};

// The resource container of a run. Releases what this process still holds of other runs.
std::string EnterRun(tensorflow::ResourceMgr* resources, const std::string& run_id);

// Looks up the resource of input `index`. A missing one means that the parameter server was
// restarted or has been taken over by a newer run, and the error says so.
template <typename Resource>
absl::Status LookupGbaResource(tensorflow::OpKernelContext* context, int index,
                               tensorflow::core::RefCountPtr<Resource>* resource) {
  const absl::Status status =
      LookupResource(context, tensorflow::HandleFromInput(context, index), resource);
  if (status.ok()) return status;
  return absl::Status(
      status.code(),
      absl::StrCat(
          "Expected the token server or gradient buffer of this run on ", context->device()->name(),
          ", found none. Either the parameter server was restarted, and its variables are "
          "lost as well: restart training from a checkpoint. Or this process belongs to an "
          "earlier run, and a newer run on the same parameter servers released what it "
          "held: end this process. (",
          status.message(), ")"));
}

}  // namespace gba

#endif  // GBA_TF_CC_KERNELS_RESOURCES_H_
