// The vocabulary of the token server: tokens, workers, closed steps.
#ifndef GBA_TF_CC_CORE_TOKEN_H_
#define GBA_TF_CC_CORE_TOKEN_H_

#include <cstdint>
#include <vector>

namespace gba {

using TokenId = int64_t;
using GlobalStep = int64_t;

// One attempt of one worker to compute one gradient.
struct Token {
  TokenId id;        // Unique within a run; issued in ascending order from 0.
  GlobalStep value;  // The global step at which synchronous training would use this batch.
};

// A worker process. A task that is restarted keeps `task` and gets a new `incarnation`.
struct WorkerId {
  int64_t task;
  int64_t incarnation;
};

// A global step whose gradients are all committed: everything that a parameter server needs to know
// to apply it. The same on every parameter server.
struct ClosedStep {
  GlobalStep step;
  std::vector<TokenId> ids;    // Ascending: gradients are summed in this order.
  std::vector<float> weights;  // weights[i] is 0 or 1 and belongs to ids[i].
  int64_t divisor;             // M; for a partial buffer, the number of its gradients.
};

}  // namespace gba

#endif  // GBA_TF_CC_CORE_TOKEN_H_
