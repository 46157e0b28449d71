#include "gba_tf/cc/kernels/resources.h"

#include "absl/strings/str_cat.h"

namespace gba {

absl::Status ToAbsl(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk:
      return absl::OkStatus();
    case StatusCode::kInvalidArgument:
      return absl::InvalidArgumentError(status.message());
    case StatusCode::kNotFound:
      return absl::NotFoundError(status.message());
    case StatusCode::kFailedPrecondition:
      return absl::FailedPreconditionError(status.message());
    case StatusCode::kCancelled:
      return absl::CancelledError(status.message());
  }
  return absl::InternalError(status.message());
}

void JobQueue::Enqueue(Job job) {
  {
    absl::MutexLock lock(&mu_);
    if (busy_) {
      waiting_.push_back(std::move(job));
      return;
    }
    busy_ = true;
  }
  job();
}

void JobQueue::Done(const std::function<void(Job)>& runner) {
  Job next;
  {
    absl::MutexLock lock(&mu_);
    if (waiting_.empty()) {
      busy_ = false;
      return;
    }
    next = std::move(waiting_.front());
    waiting_.pop_front();
  }
  runner(std::move(next));
}

TokenServerResource::TokenServerResource(std::unique_ptr<const Policy> policy)
    : server_(std::move(policy)) {}

std::string TokenServerResource::DebugString() const {
  return absl::StrCat("token server of policy ", server_.policy().Describe());
}

GradientBufferResource::GradientBufferResource(std::vector<VariableLayout> layout,
                                               SparseDivisor sparse_divisor)
    : layout_(layout),
      sparse_divisor_(sparse_divisor),
      buffer_(std::move(layout), sparse_divisor) {}

std::string GradientBufferResource::DebugString() const {
  const BufferStats stats = buffer_.stats();
  return absl::StrCat("GBA gradient buffer, ", layout_.size(), " variables, ", stats.num_gradients,
                      " gradients, ", stats.num_bytes, " bytes");
}

absl::Status GradientBufferResource::Restore(std::vector<std::pair<TokenId, Block>> gradients,
                                             int64_t applied_steps) {
  const absl::Status status = ToAbsl(buffer_.Restore(std::move(gradients)));
  if (!status.ok()) return status;
  applied_steps_.store(applied_steps);
  failure_ = absl::OkStatus();
  shared_state_.clear();
  findings_.clear();
  return status;
}

std::string EnterRun(tensorflow::ResourceMgr* resources, const std::string& run_id) {
  static absl::Mutex mu(absl::kConstInit);
  static auto* current = new std::map<tensorflow::ResourceMgr*, std::string>();
  const std::string container = absl::StrCat("gba_tf/", run_id);
  std::string previous;
  {
    absl::MutexLock lock(&mu);
    std::string& held = (*current)[resources];
    if (held != container) previous = std::exchange(held, container);
  }
  // A failure means that there is nothing to release.
  if (!previous.empty()) resources->Cleanup(previous).IgnoreError();
  return container;
}

}  // namespace gba
