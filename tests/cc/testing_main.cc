#include <mutex>

#include "tests/cc/testing.h"

namespace gba_testing {

std::vector<Test>& Tests() {
  static std::vector<Test> tests;
  return tests;
}

std::atomic<int>& FailedExpectations() {
  static std::atomic<int> count{0};
  return count;
}

void Fail(const char* file, int line, const std::string& message) {
  static std::mutex mu;
  std::lock_guard<std::mutex> lock(mu);
  ++FailedExpectations();
  std::cerr << file << ":" << line << ": " << message << std::endl;
}

}  // namespace gba_testing

int main(int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  int passed = 0, failed = 0;
  for (const gba_testing::Test& test : gba_testing::Tests()) {
    if (test.name.find(filter) == std::string::npos) continue;
    const int before = gba_testing::FailedExpectations();
    test.run();
    const bool ok = gba_testing::FailedExpectations() == before;
    ++(ok ? passed : failed);
    std::cout << (ok ? "ok     " : "FAILED ") << test.name << std::endl;
  }
  if (passed + failed == 0) std::cerr << "No test has '" << filter << "' in its name." << std::endl;
  std::cout << passed << " passed, " << failed << " failed" << std::endl;
  return failed == 0 && passed > 0 ? 0 : 1;
}
