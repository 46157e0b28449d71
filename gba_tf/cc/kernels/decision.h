// How a commit's outcome travels from the token server to every parameter server: one int64 vector.
//
//   [oldest live id, number of steps s, then s times: step, divisor, n, n ids, n weights (0 or 1)]
//
// Example, step 7 of tokens 28 and 31, the second one too stale, oldest live token 30:
//   [30, 1, 7, 2, 2, 28, 31, 1, 0]
#ifndef GBA_TF_CC_KERNELS_DECISION_H_
#define GBA_TF_CC_KERNELS_DECISION_H_

#include <vector>

#include "absl/status/status.h"
#include "gba_tf/cc/core/token.h"
#include "gba_tf/cc/core/token_server.h"
#include "tensorflow/core/framework/tensor.h"

namespace gba {

struct Decision {
  TokenId oldest_live_id = 0;
  std::vector<ClosedStep> steps;
};

std::vector<int64_t> EncodeDecision(const CommitOutcome& outcome);

// InvalidArgument if `tensor` is not what EncodeDecision writes.
absl::Status DecodeDecision(const tensorflow::Tensor& tensor, Decision* decision);

}  // namespace gba

#endif  // GBA_TF_CC_KERNELS_DECISION_H_
