#include "gba_tf/cc/core/packed_gradient.h"

#include <cstring>
#include <limits>

#include "tests/cc/testing.h"

namespace {

using gba::GradientInput;
using gba::GradientPacker;
using gba::GradientView;
using gba::IdType;
using gba::ParsePackedGradient;
using gba::StatusCode;
using gba::ValueType;
using gba::VariableLayout;

VariableLayout Dense(int64_t num_elements, ValueType type = ValueType::kFloat32) {
  VariableLayout layout;
  layout.value_type = type;
  layout.num_elements = num_elements;
  return layout;
}

VariableLayout Sparse(int64_t num_rows, int64_t row_width, IdType id_type = IdType::kInt64,
                      ValueType type = ValueType::kFloat32, bool merge_rows = true) {
  VariableLayout layout;
  layout.value_type = type;
  layout.sparse = true;
  layout.num_rows = num_rows;
  layout.row_width = row_width;
  layout.id_type = id_type;
  layout.merge_rows = merge_rows;
  return layout;
}

VariableLayout RowsApart(int64_t num_rows, int64_t row_width, IdType id_type = IdType::kInt64,
                         ValueType type = ValueType::kFloat32) {
  return Sparse(num_rows, row_width, id_type, type, /*merge_rows=*/false);
}

std::string Pack(const std::vector<VariableLayout>& layout,
                 const std::vector<GradientInput>& gradients) {
  GradientPacker packer;
  EXPECT_OK(packer.Init(layout, gradients));
  std::string block(packer.packed_bytes(), 'x');  // So that a gap that is not written shows.
  packer.Write(block.data());
  return block;
}

template <typename T>
std::vector<T> Read(const void* from, int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  if (count > 0) std::memcpy(values.data(), from, values.size() * sizeof(T));
  return values;
}

TEST(BlockHasTheDocumentedBytes) {
  const float dense[] = {1, 2, 3};
  const int32_t ids[] = {4, 1};
  const float rows[] = {10, 11, 20, 21};
  const std::string block =
      Pack({Dense(3), Sparse(5, 2, IdType::kInt32)}, {{dense, nullptr, 0}, {rows, ids, 2}});
  std::string expected(5 * 64, '\0');
  const uint32_t head[] = {0x47414247, 2};
  const uint64_t sizes[] = {2, 5 * 64};
  const int64_t count_and_kind[] = {2, 0};
  const int32_t sorted_ids[] = {1, 4};
  const float sorted_rows[] = {20, 21, 10, 11};
  std::memcpy(&expected[0], head, 8);
  std::memcpy(&expected[8], sizes, 16);
  std::memcpy(&expected[64], dense, 12);
  std::memcpy(&expected[128], count_and_kind, 16);
  std::memcpy(&expected[192], sorted_ids, 8);
  std::memcpy(&expected[256], sorted_rows, 16);
  EXPECT_EQ(block == expected, true);
}

TEST(BlockOfRowsKeptApartHasTheDocumentedBytes) {
  const int32_t ids[] = {4, 1, 4};
  const float rows[] = {10, 11, 20, 21, 30, 31};
  const std::string block = Pack({RowsApart(5, 2, IdType::kInt32)}, {{rows, ids, 3}});
  std::string expected(4 * 64, '\0');
  const uint32_t head[] = {0x47414247, 2};
  const uint64_t sizes[] = {1, 4 * 64};
  const int64_t count_and_kind[] = {3, 1};
  std::memcpy(&expected[0], head, 8);
  std::memcpy(&expected[8], sizes, 16);
  std::memcpy(&expected[64], count_and_kind, 16);
  std::memcpy(&expected[128], ids, 12);
  std::memcpy(&expected[192], rows, 24);
  EXPECT_EQ(block == expected, true);
}

TEST(RowsKeptApartMayRepeatInAnyOrderMoreOftenThanThereAreRows) {
  const int64_t ids[] = {1, 0, 1, 1};
  const uint16_t rows[] = {0x3c00, 0x7d55, 0x0001, 0x8000};  // Whatever their bits: 1, NaN, ...
  const std::vector<VariableLayout> layout = {RowsApart(2, 1, IdType::kInt64, ValueType::kFloat16)};
  const std::string block = Pack(layout, {{rows, ids, 4}});
  for (size_t shift : {0, 3}) {
    const std::string moved = std::string(shift, 'x') + block;
    std::vector<GradientView> views;
    ASSERT_OK(ParsePackedGradient(layout, moved.data() + shift, block.size(), &views));
    ASSERT_EQ(views[0].num_ids, 4);
    EXPECT_EQ(Read<int64_t>(views[0].ids, 4), (std::vector<int64_t>{1, 0, 1, 1}));
    EXPECT_EQ(Read<uint16_t>(views[0].values, 4),
              (std::vector<uint16_t>{0x3c00, 0x7d55, 0x0001, 0x8000}));
  }
}

TEST(RepeatedRowsAreSummedInOrderOfOccurrence) {
  // In float32, (1e8 + 1) - 1e8 is 0, and 1e8 - 1e8 + 1 is 1.
  const int64_t ids[] = {3, 0, 3, 3, 0, 0};
  const float rows[] = {1e8f, 1e8f, 1, -1e8f, -1e8f, 1};
  const std::vector<VariableLayout> layout = {Sparse(4, 1)};
  const std::string block = Pack(layout, {{rows, ids, 6}});
  std::vector<GradientView> views;
  ASSERT_OK(ParsePackedGradient(layout, block.data(), block.size(), &views));
  EXPECT_EQ(Read<int64_t>(views[0].ids, views[0].num_ids), (std::vector<int64_t>{0, 3}));
  EXPECT_EQ(Read<float>(views[0].values, 2), (std::vector<float>{1, 0}));
}

TEST(HalfTypesAreSummedInFloat32) {
  // 2048 + 1 + 1 is 2048 if each sum is rounded to float16, and 2050 in float32.
  const int32_t ids[] = {1, 1, 1};
  const uint16_t float16_rows[] = {0x6800, 0x3c00, 0x3c00};
  // 256 + 1 + 1 is 256 if each sum is rounded to bfloat16, and 258 in float32.
  const uint16_t bfloat16_rows[] = {0x4380, 0x3f80, 0x3f80};
  const std::vector<VariableLayout> layout = {Sparse(2, 1, IdType::kInt32, ValueType::kFloat16),
                                              Sparse(2, 1, IdType::kInt32, ValueType::kBFloat16)};
  const std::string block = Pack(layout, {{float16_rows, ids, 3}, {bfloat16_rows, ids, 3}});
  std::vector<GradientView> views;
  ASSERT_OK(ParsePackedGradient(layout, block.data(), block.size(), &views));
  EXPECT_EQ(Read<uint16_t>(views[0].values, 1)[0], 0x6801);
  EXPECT_EQ(Read<uint16_t>(views[1].values, 1)[0], 0x4381);
}

TEST(ManyRowsWithManyRepetitionsMatchAPlainLoop) {
  constexpr int64_t kRows = 5000, kWidth = 3, kIds = 20000;
  std::vector<int64_t> ids;
  std::vector<double> rows;
  std::vector<std::vector<double>> expected(kRows);
  uint64_t state = 1;
  for (int64_t i = 0; i < kIds; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const int64_t id = static_cast<int64_t>(state >> 33) % kRows;
    ids.push_back(id);
    auto& sum = expected[static_cast<size_t>(id)];
    for (int64_t j = 0; j < kWidth; ++j) {
      rows.push_back(1.0 / static_cast<double>(i + j + 1));
      if (sum.size() < kWidth) {
        sum.push_back(rows.back());
      } else {
        sum[static_cast<size_t>(j)] += rows.back();
      }
    }
  }
  const std::vector<VariableLayout> layout = {
      Sparse(kRows, kWidth, IdType::kInt64, ValueType::kFloat64)};
  const std::string block = Pack(layout, {{rows.data(), ids.data(), kIds}});
  std::vector<GradientView> views;
  ASSERT_OK(ParsePackedGradient(layout, block.data(), block.size(), &views));
  std::vector<int64_t> expected_ids;
  std::vector<double> expected_rows;
  for (int64_t id = 0; id < kRows; ++id) {
    const auto& sum = expected[static_cast<size_t>(id)];
    if (sum.empty()) continue;
    expected_ids.push_back(id);
    expected_rows.insert(expected_rows.end(), sum.begin(), sum.end());
  }
  EXPECT_EQ(Read<int64_t>(views[0].ids, views[0].num_ids) == expected_ids, true);
  EXPECT_EQ(Read<double>(views[0].values, views[0].num_ids * kWidth) == expected_rows, true);
}

TEST(EmptyGradientsAndEmptyVariablesArePackedAndParsed) {
  const std::vector<VariableLayout> layout = {Dense(0), Sparse(0, 0), Sparse(7, 3), RowsApart(0, 0),
                                              RowsApart(7, 3)};
  const std::string block = Pack(layout, {{}, {}, {}, {}, {}});
  std::vector<GradientView> views;
  ASSERT_OK(ParsePackedGradient(layout, block.data(), block.size(), &views));
  for (size_t v = 1; v < layout.size(); ++v) EXPECT_EQ(views[v].num_ids, 0);
  const std::string none = Pack({}, {});
  EXPECT_EQ(none.size(), size_t{64});
  ASSERT_OK(ParsePackedGradient({}, none.data(), none.size(), &views));
}

TEST(BlockAtAnyAddressIsParsed) {
  const std::vector<VariableLayout> layout = {Dense(2), Sparse(9, 1)};
  const float dense[] = {1, 2};
  const int64_t ids[] = {8, 2};
  const float rows[] = {5, 6};
  const std::string block = Pack(layout, {{dense, nullptr, 0}, {rows, ids, 2}});
  for (size_t shift = 1; shift < 8; ++shift) {
    const std::string moved = std::string(shift, 'x') + block;
    std::vector<GradientView> views;
    ASSERT_OK(ParsePackedGradient(layout, moved.data() + shift, block.size(), &views));
    EXPECT_EQ(Read<float>(views[0].values, 2), (std::vector<float>{1, 2}));
    EXPECT_EQ(Read<int64_t>(views[1].ids, 2), (std::vector<int64_t>{2, 8}));
    EXPECT_EQ(Read<float>(views[1].values, 2), (std::vector<float>{6, 5}));
  }
}

TEST(InputAtAnyAddressIsPacked) {
  std::string ids(1 + 16, '\0'), rows(1 + 8, '\0');
  const int64_t aligned_ids[] = {3, 1};
  const float aligned_rows[] = {7, 8};
  std::memcpy(&ids[1], aligned_ids, 16);
  std::memcpy(&rows[1], aligned_rows, 8);
  EXPECT_EQ(Pack({Sparse(4, 1)}, {{&rows[1], &ids[1], 2}}) ==
                Pack({Sparse(4, 1)}, {{aligned_rows, aligned_ids, 2}}),
            true);
}

TEST(PackerNamesTheVariableAndTheRowOutOfRange) {
  GradientPacker packer;
  const float values[] = {1, 2};
  const int64_t high[] = {0, 10};
  const int64_t low[] = {-1, 0};
  const std::vector<VariableLayout> layout = {Dense(1), Sparse(10, 1)};
  EXPECT_ERROR(packer.Init(layout, {{values, nullptr, 0}, {values, high, 2}}),
               StatusCode::kInvalidArgument,
               "Variable 1: expected row ids in [0, 10), found 10 at position 1");
  EXPECT_ERROR(packer.Init(layout, {{values, nullptr, 0}, {values, low, 2}}),
               StatusCode::kInvalidArgument, "found -1 at position 0");
  EXPECT_ERROR(packer.Init({RowsApart(10, 1)}, {{values, high, 2}}), StatusCode::kInvalidArgument,
               "Variable 0: expected row ids in [0, 10), found 10 at position 1");
}

TEST(PackerRefusesCountsThatDoNotFit) {
  GradientPacker packer;
  const float values[] = {1};
  const int64_t ids[] = {0};
  EXPECT_ERROR(packer.Init({Dense(1), Dense(1)}, {{values, nullptr, 0}}),
               StatusCode::kInvalidArgument,
               "Expected 2 gradients, one for each variable, found 1");
  EXPECT_ERROR(packer.Init({Sparse(2, 1)}, {{values, ids, -1}}), StatusCode::kInvalidArgument,
               "Variable 0: expected at least 0 row ids, found -1");
  EXPECT_ERROR(packer.Init({Sparse(2, 1)}, {{values, nullptr, 1}}), StatusCode::kInvalidArgument,
               "Variable 0: expected 1 row ids, found none");
  EXPECT_ERROR(packer.Init({Sparse(2, 1)}, {{nullptr, ids, 1}}), StatusCode::kInvalidArgument,
               "Variable 0: expected values, found none");
  EXPECT_ERROR(packer.Init({Dense(-1)}, {{}}), StatusCode::kInvalidArgument,
               "expected at least 0 elements in the layout, found -1");
  EXPECT_ERROR(packer.Init({Sparse(2, 0)}, {{}}), StatusCode::kInvalidArgument, "row_width 0");
  EXPECT_ERROR(packer.Init({Sparse(int64_t{1} << 40, 1, IdType::kInt32)}, {{}}),
               StatusCode::kInvalidArgument, "Use int64 ids");
  EXPECT_ERROR(packer.Init({Dense(std::numeric_limits<int64_t>::max())}, {{values, nullptr, 0}}),
               StatusCode::kInvalidArgument, "less than 2^62 bytes");
}

struct Example {
  std::vector<VariableLayout> layout = {Dense(3), Sparse(9, 2)};
  std::string block;
  Example() {
    static const float dense[] = {1, 2, 3};
    static const int64_t ids[] = {8, 2, 5};
    static const float rows[] = {1, 2, 3, 4, 5, 6};
    block = Pack(layout, {{dense, nullptr, 0}, {rows, ids, 3}});
  }
  gba::Status Parse(const std::string& bytes) const {
    // A copy of exactly this size, so that AddressSanitizer sees a read beyond it.
    std::vector<char> exact(bytes.begin(), bytes.end());
    std::vector<GradientView> views;
    return ParsePackedGradient(layout, exact.data(), exact.size(), &views);
  }
  template <typename T>
  std::string With(size_t offset, T value) const {
    std::string bytes = block;
    std::memcpy(&bytes[offset], &value, sizeof(value));
    return bytes;
  }
};

TEST(ParseSaysWhatWasExpectedAndFound) {
  const Example example;
  EXPECT_OK(example.Parse(example.block));
  const auto error = StatusCode::kInvalidArgument;
  EXPECT_ERROR(example.Parse(""), error, "expected at least 64 bytes, found 0");
  EXPECT_ERROR(example.Parse(example.With(0, 7)), error, "expected magic 1195459143, found 7");
  EXPECT_ERROR(example.Parse(example.With(4, 9)), error, "expected format version 2, found 9");
  EXPECT_ERROR(example.Parse(example.With(8, int64_t{3})), error, "expected 2 variables, found 3");
  EXPECT_ERROR(example.Parse(example.With(16, int64_t{384})), error,
               "expected 384 bytes, as its header says, found 320");
  EXPECT_ERROR(example.Parse(example.block + std::string(64, '\0')), error, "found 384");
  EXPECT_ERROR(example.Parse(example.With(128, int64_t{-1})), error,
               "Variable 1: expected 0 to 9 rows, found -1");
  EXPECT_ERROR(example.Parse(example.With(128, int64_t{10})), error, "found 10");
  EXPECT_ERROR(example.Parse(example.With(192, int64_t{-1})), error, "found -1 after -1");
  EXPECT_ERROR(example.Parse(example.With(200, int64_t{2})), error,
               "Variable 1: expected row ids ascending, distinct and in [0, 9), found 2 after 2 at "
               "position 1");
  EXPECT_ERROR(example.Parse(example.With(208, int64_t{9})), error, "found 9 after 5");
}

TEST(ParseChecksTheRangeOfRowsKeptApart) {
  const int64_t ids[] = {8, 2, 8};
  const float rows[] = {1, 2, 3};
  Example example;
  example.layout = {RowsApart(9, 1)};
  example.block = Pack(example.layout, {{rows, ids, 3}});
  EXPECT_OK(example.Parse(example.block));
  const auto error = StatusCode::kInvalidArgument;
  EXPECT_ERROR(example.Parse(example.With(128, int64_t{-1})), error, "found -1 at position 0");
  EXPECT_ERROR(example.Parse(example.With(144, int64_t{9})), error,
               "Variable 0: expected row ids in [0, 9), found 9 at position 2");
  EXPECT_ERROR(example.Parse(example.With(64, int64_t{-1})), error, "rows, found -1");
  EXPECT_ERROR(example.Parse(example.With(64, int64_t{9})), error,
               "expected a block of at least 320 bytes, found 256");
  EXPECT_ERROR(example.Parse(example.With(64, std::numeric_limits<int64_t>::max())), error,
               "2^62 bytes");
}

TEST(MergedRowsAndRowsKeptApartAreNotMistakenForEachOther) {
  const int64_t ids[] = {2, 8};  // Ascending and distinct: only the kind tells.
  const float rows[] = {1, 2};
  Example example;
  example.layout = {Dense(0), Sparse(9, 1)};
  const std::vector<VariableLayout> apart = {Dense(0), RowsApart(9, 1)};
  example.block = Pack(apart, {{}, {rows, ids, 2}});
  EXPECT_ERROR(example.Parse(example.block), StatusCode::kInvalidArgument,
               "Variable 1: expected row kind 0, found 1 (0: merged, 1: kept apart). Worker and "
               "parameter server must agree on merge_rows.");
  example.block = Pack(example.layout, {{}, {rows, ids, 2}});
  EXPECT_OK(example.Parse(example.block));
  example.layout = apart;
  EXPECT_ERROR(example.Parse(example.block), StatusCode::kInvalidArgument,
               "Variable 1: expected row kind 1, found 0");
}

TEST(ParseRefusesABlockOfAnotherLayout) {
  const Example example;
  std::vector<GradientView> views;
  EXPECT_ERROR(ParsePackedGradient({Dense(100), Sparse(9, 2)}, example.block.data(),
                                   example.block.size(), &views),
               StatusCode::kInvalidArgument, "agree on the variables");
  EXPECT_ERROR(
      ParsePackedGradient({Dense(3), Dense(3)}, example.block.data(), example.block.size(), &views),
      StatusCode::kInvalidArgument, "expected 192 bytes for this layout, found 320");
  EXPECT_ERROR(ParsePackedGradient({Dense(3), Sparse(9, int64_t{1} << 59)}, example.block.data(),
                                   example.block.size(), &views),
               StatusCode::kInvalidArgument, "2^62 bytes");
}

TEST(ParseRefusesEveryTruncation) {
  const Example example;
  for (uint64_t size = 0; size < example.block.size(); ++size) {
    EXPECT_EQ(example.Parse(example.block.substr(0, size)).ok(), false);
    if (size < 64) continue;
    // Also if the header says so.
    EXPECT_EQ(example.Parse(example.With(16, size).substr(0, size)).ok(), false);
  }
}

TEST(ParseSurvivesHostileNumbers) {
  const Example example;
  for (size_t offset = 0; offset + 8 <= example.block.size(); offset += 8) {
    for (int64_t value :
         {int64_t{-1}, int64_t{1} << 61, int64_t{1} << 32, std::numeric_limits<int64_t>::max(),
          std::numeric_limits<int64_t>::min()}) {
      const gba::Status status = example.Parse(example.With(offset, value));
      // Only gaps and values may hold anything.
      const bool gap =
          (offset >= 24 && offset < 128) || (offset >= 144 && offset < 192) || offset >= 216;
      EXPECT_EQ(status.ok(), gap);
    }
  }
}

}  // namespace
