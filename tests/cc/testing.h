// Just enough to write tests of the core without another dependency.
//
//   TEST(PolicyGivesWeightOneUpToTheTolerance) { EXPECT_EQ(policy.Weight(5, 1), 1.0f); }
//
// EXPECT_EQ prints expected and found and goes on. A program runs all of its tests, or those whose
// name contains its first argument, and returns 1 if an expectation failed or no test was found.
#ifndef GBA_TF_TESTS_CC_TESTING_H_
#define GBA_TF_TESTS_CC_TESTING_H_

#include <atomic>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace gba_testing {

struct Test {
  std::string name;
  void (*run)();
};

std::vector<Test>& Tests();
std::atomic<int>& FailedExpectations();
void Fail(const char* file, int line, const std::string& message);

struct Register {
  Register(const char* name, void (*run)()) { Tests().push_back({name, run}); }
};

template <typename T>
void Print(std::ostream& out, const T& value) {
  out << value;
}
template <typename T>
void Print(std::ostream& out, const std::vector<T>& values) {
  out << "{";
  for (size_t i = 0; i < values.size(); ++i) Print(out << (i > 0 ? ", " : ""), values[i]);
  out << "}";
}
template <typename Key, typename T>
void Print(std::ostream& out, const std::map<Key, T>& values) {
  out << "{";
  for (const auto& [key, value] : values) out << " " << key << ": " << value;
  out << " }";
}

template <typename Found, typename Expected>
bool ExpectEq(const char* file, int line, const char* text, const Found& found,
              const Expected& expected) {
  if (found == expected) return true;
  std::ostringstream message;
  message.precision(17);
  message << text << "\n  expected ";
  Print(message, expected);
  message << "\n  found    ";
  Print(message, found);
  Fail(file, line, message.str());
  return false;
}

inline bool ExpectContains(const char* file, int line, const char* text, const std::string& found,
                           const std::string& part) {
  if (found.find(part) != std::string::npos) return true;
  Fail(file, line, std::string(text) + "\n  expected to contain " + part + "\n  found " + found);
  return false;
}

}  // namespace gba_testing

#define TEST(name)                                                 \
  static void name();                                              \
  static const gba_testing::Register register_##name{#name, name}; \
  static void name()

// Both are true if the expectation holds.
#define EXPECT_EQ(found, expected) \
  gba_testing::ExpectEq(__FILE__, __LINE__, #found, (found), (expected))
#define EXPECT_CONTAINS(found, part) \
  gba_testing::ExpectContains(__FILE__, __LINE__, #found, (found), (part))

// Ends the test if the rest of it would make no sense.
#define ASSERT_EQ(found, expected)           \
  do {                                       \
    if (!EXPECT_EQ(found, expected)) return; \
  } while (false)

// For a status that has to be good, and for one that has to say what is wrong.
#define EXPECT_OK(status) EXPECT_EQ((status).message(), "")
#define ASSERT_OK(status) ASSERT_EQ((status).message(), "")
#define EXPECT_ERROR(status, expected_code, part)                                      \
  do {                                                                                 \
    const gba::Status found_status = (status);                                         \
    EXPECT_EQ(static_cast<int>(found_status.code()), static_cast<int>(expected_code)); \
    EXPECT_CONTAINS(found_status.message(), part);                                     \
  } while (false)

#endif  // GBA_TF_TESTS_CC_TESTING_H_
