// Takes a token from a token server that is expected to give it at once.
#ifndef GBA_TF_TESTS_CC_TAKE_H_
#define GBA_TF_TESTS_CC_TAKE_H_

#include "gba_tf/cc/core/token_server.h"
#include "tests/cc/testing.h"

namespace gba_testing {

// A token with id -1 if there is none at once.
inline gba::Token Take(gba::TokenServer* server, gba::WorkerId worker) {
  // The callback of a Take that waits may be called later than this returns.
  auto token = std::make_shared<gba::Token>(gba::Token{-1, -1});
  server->Take(worker, [token](const gba::Status&, const gba::Token& taken) { *token = taken; });
  EXPECT_EQ(token->id >= 0, true);
  return *token;
}

}  // namespace gba_testing

#endif  // GBA_TF_TESTS_CC_TAKE_H_
