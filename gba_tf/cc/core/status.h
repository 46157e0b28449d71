// A status without TensorFlow: the core returns it, the kernels turn it into an absl::Status.
#ifndef GBA_TF_CC_CORE_STATUS_H_
#define GBA_TF_CC_CORE_STATUS_H_

#include <string>
#include <utility>

namespace gba {

enum class StatusCode { kOk, kInvalidArgument, kNotFound, kFailedPrecondition, kCancelled };

class [[nodiscard]] Status {
 public:
  Status() = default;

  static Status InvalidArgument(std::string message) {
    return Status(StatusCode::kInvalidArgument, std::move(message));
  }
  static Status NotFound(std::string message) {
    return Status(StatusCode::kNotFound, std::move(message));
  }
  static Status FailedPrecondition(std::string message) {
    return Status(StatusCode::kFailedPrecondition, std::move(message));
  }

  static Status Cancelled(std::string message) {
    return Status(StatusCode::kCancelled, std::move(message));
  }

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

}  // namespace gba

#endif  // GBA_TF_CC_CORE_STATUS_H_
