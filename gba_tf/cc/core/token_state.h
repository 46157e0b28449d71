// Everything a token server knows, and how it is saved.
#ifndef GBA_TF_CC_CORE_TOKEN_STATE_H_
#define GBA_TF_CC_CORE_TOKEN_STATE_H_

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>

#include "gba_tf/cc/core/policy.h"
#include "gba_tf/cc/core/status.h"
#include "gba_tf/cc/core/token.h"

namespace gba {

// A closed step that is not yet marked as applied.
struct UnappliedStep {
  ClosedStep closed;
  // The worker that has to apply it. None: the end of training.
  std::optional<int64_t> closing_task;
  // That worker will not: hand the step to the next commit.
  bool orphaned = false;
};

struct OutstandingToken {
  GlobalStep value;
  int64_t worker_task;
  double taken_at;  // Seconds on the token server's clock. Not saved.
};

struct TokenState {
  TokenId next_id = 0;
  GlobalStep global_step = 0;
  int64_t applied = 0;
  int64_t decayed = 0;
  int64_t lost = 0;
  std::map<int64_t, int64_t> staleness;
  std::map<TokenId, OutstandingToken> outstanding;
  std::map<int64_t, TokenId> held;         // Worker task -> its outstanding token.
  std::map<TokenId, GlobalStep> buffered;  // Id -> value.
  std::deque<UnappliedStep> unapplied;     // Consecutive steps; the last one is global_step - 1.
};

// Format, little-endian: magic, version, the policy's name in 8 bytes and its capacity, the fields
// above without `outstanding` and `held` (those tokens are written as lost), and an FNV-1a checksum
// of all before it.
std::string EncodeTokenState(const TokenState& state, const Policy& policy);

// Reads what EncodeTokenState wrote with a policy of the same name and capacity. All unapplied
// steps are orphaned: the workers that closed them do not survive a restore. Returns
// InvalidArgument, and leaves `state` alone, if the bytes are truncated or damaged, of another
// format version, saved with another policy or capacity, or contradict themselves.
Status DecodeTokenState(const std::string& bytes, const Policy& policy, TokenState* state);

}  // namespace gba

#endif  // GBA_TF_CC_CORE_TOKEN_STATE_H_
