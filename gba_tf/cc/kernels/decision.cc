#include "gba_tf/cc/kernels/decision.h"

#include "tensorflow/core/platform/errors.h"

namespace gba {

std::vector<int64_t> EncodeDecision(const CommitOutcome& outcome) {
  std::vector<int64_t> encoded = {outcome.oldest_live_id,
                                  static_cast<int64_t>(outcome.to_apply.size())};
  for (const ClosedStep& step : outcome.to_apply) {
    encoded.insert(encoded.end(), {step.step, step.divisor, static_cast<int64_t>(step.ids.size())});
    encoded.insert(encoded.end(), step.ids.begin(), step.ids.end());
    for (const float weight : step.weights) encoded.push_back(weight != 0.0f ? 1 : 0);
  }
  return encoded;
}

absl::Status DecodeDecision(const tensorflow::Tensor& tensor, Decision* decision) {
  const auto values = tensor.flat<int64_t>();
  const int64_t size = values.size();
  const absl::Status malformed = tensorflow::errors::InvalidArgument(
      "Expected a decision of GbaCommitToken or GbaFlush, found an int64 vector of ", size,
      " elements that is not one.");
  if (size < 2 || values(1) < 0) return malformed;
  decision->oldest_live_id = values(0);
  decision->steps.clear();
  int64_t at = 2;
  for (int64_t s = 0; s < values(1); ++s) {
    if (size - at < 3) return malformed;
    ClosedStep step;
    step.step = values(at);
    step.divisor = values(at + 1);
    const int64_t count = values(at + 2);
    at += 3;
    if (step.divisor < 1 || count < 0 || count > (size - at) / 2) return malformed;
    for (int64_t i = 0; i < count; ++i) step.ids.push_back(values(at + i));
    for (int64_t i = 0; i < count; ++i) {
      step.weights.push_back(static_cast<float>(values(at + count + i)));
    }
    at += 2 * count;
    decision->steps.push_back(std::move(step));
  }
  if (at != size) return malformed;
  return absl::OkStatus();
}

}  // namespace gba
