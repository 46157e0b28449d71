#include "gba_tf/cc/core/gradient_buffer.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <set>
#include <thread>

#include "tests/cc/testing.h"

namespace {

using gba::Block;
using gba::BufferStats;
using gba::ClosedStep;
using gba::GradientBuffer;
using gba::GradientInput;
using gba::GradientPacker;
using gba::IdType;
using gba::PreparedUpdate;
using gba::SparseDivisor;
using gba::StatusCode;
using gba::ValueType;
using gba::VariableLayout;

using Ints = std::vector<int64_t>;
using Floats = std::vector<float>;

// Variable 0: dense, 2 elements. Variable 1: sparse, 10 rows of 1.
std::vector<VariableLayout> Layout() {
  VariableLayout dense, sparse;
  dense.num_elements = 2;
  sparse.sparse = true;
  sparse.num_rows = 10;
  sparse.row_width = 1;
  return {dense, sparse};
}

Block Pack(const std::vector<VariableLayout>& layout, const std::vector<GradientInput>& gradients) {
  GradientPacker packer;
  EXPECT_OK(packer.Init(layout, gradients));
  auto bytes = std::make_shared<std::vector<char>>(packer.packed_bytes());
  packer.Write(bytes->data());
  return {bytes->data(), bytes->size(), bytes};
}

template <typename Id, typename Value>
GradientInput Rows(const std::vector<Id>& ids, const std::vector<Value>& values) {
  return {values.data(), ids.data(), static_cast<int64_t>(ids.size())};
}

Block Gradient(const Floats& dense, const Ints& ids, const Floats& rows) {
  return Pack(Layout(), {{dense.data(), nullptr, 0}, Rows(ids, rows)});
}

ClosedStep Step(const Ints& ids, const Floats& weights, int64_t divisor, int64_t step = 0) {
  return {step, ids, weights, divisor};
}

struct Update {
  Floats dense;
  Ints ids;
  Floats rows;
};

Update Write(const PreparedUpdate& prepared) {
  Update update;
  const auto num_rows = static_cast<size_t>(prepared.num_rows(1));
  update.dense.assign(2, -1);
  update.ids.assign(num_rows, -1);
  update.rows.assign(num_rows, -1);
  EXPECT_EQ(prepared.num_rows(0), 0);
  prepared.WriteDense(0, update.dense.data());
  prepared.WriteSparse(1, update.ids.data(), update.rows.data());
  return update;
}

constexpr int64_t kBlockBytes = 5 * 64;  // Header, dense, count, ids, rows.

TEST(UpdateIsTheMeanOverTheDivisor) {
  GradientBuffer buffer(Layout(), SparseDivisor::kGradientsPerUpdate);
  EXPECT_OK(buffer.Push(5, Gradient({1, 2}, {7, 3}, {10, 20})));
  EXPECT_OK(buffer.Push(2, Gradient({3, 5}, {3, 0}, {40, 50})));
  PreparedUpdate prepared;
  ASSERT_OK(buffer.Prepare(Step({2, 5}, {1, 1}, 4), &prepared));
  const Update update = Write(prepared);
  EXPECT_EQ(update.dense, (Floats{1, 1.75f}));
  EXPECT_EQ(update.ids, (Ints{0, 3, 7}));
  EXPECT_EQ(update.rows, (Floats{12.5f, 15, 2.5f}));
}

TEST(RowsCanBeDividedByTheGradientsThatContainThem) {
  GradientBuffer buffer(Layout(), SparseDivisor::kGradientsWithRow);
  EXPECT_OK(buffer.Push(0, Gradient({1, 2}, {7, 3}, {10, 20})));
  EXPECT_OK(buffer.Push(1, Gradient({3, 5}, {3, 0}, {40, 50})));
  EXPECT_OK(buffer.Push(2, Gradient({0, 0}, {3}, {600})));
  PreparedUpdate prepared;
  ASSERT_OK(buffer.Prepare(Step({0, 1, 2}, {1, 1, 0}, 4), &prepared));
  const Update update = Write(prepared);
  EXPECT_EQ(update.dense, (Floats{1, 1.75f}));
  EXPECT_EQ(update.ids, (Ints{0, 3, 7}));
  EXPECT_EQ(update.rows, (Floats{50, 30, 10}));
}

// ---- Rows kept apart ----

// One sparse variable, 10 rows of `row_width`.
VariableLayout RowsApart(int64_t row_width, IdType id_type = IdType::kInt64,
                         ValueType type = ValueType::kFloat32) {
  VariableLayout layout;
  layout.value_type = type;
  layout.sparse = true;
  layout.num_rows = 10;
  layout.row_width = row_width;
  layout.id_type = id_type;
  layout.merge_rows = false;
  return layout;
}

// The ids and values of variable 0.
template <typename Id, typename Value>
std::pair<std::vector<Id>, std::vector<Value>> WriteRows(const PreparedUpdate& prepared,
                                                         size_t row_width) {
  const auto num_rows = static_cast<size_t>(prepared.num_rows(0));
  std::vector<Id> ids(num_rows + 1, 99);  // One more, to see a write beyond the end.
  std::vector<Value> values(num_rows * row_width + 1, 99);
  prepared.WriteSparse(0, ids.data(), values.data());
  EXPECT_EQ(ids.back(), Id{99});
  EXPECT_EQ(values.back(), Value{99});
  ids.pop_back();
  values.pop_back();
  return {ids, values};
}

TEST(RowsKeptApartFollowInTokenIdOrderEachDividedAlone) {
  const std::vector<VariableLayout> layout = {RowsApart(2)};
  GradientBuffer buffer(layout, SparseDivisor::kGradientsPerUpdate);
  EXPECT_OK(buffer.Push(5, Pack(layout, {Rows(Ints{7, 3, 7}, Floats{10, 11, 20, 21, 30, 31})})));
  EXPECT_OK(buffer.Push(4, Pack(layout, {Rows(Ints{1}, Floats{600, 600})})));
  EXPECT_OK(buffer.Push(3, Pack(layout, {{}})));
  EXPECT_OK(buffer.Push(2, Pack(layout, {Rows(Ints{3}, Floats{40, 41})})));
  PreparedUpdate prepared;
  ASSERT_OK(buffer.Prepare(Step({2, 3, 4, 5}, {1, 1, 0, 1}, 4), &prepared));
  const auto [ids, values] = WriteRows<int64_t, float>(prepared, 2);
  EXPECT_EQ(ids, (Ints{3, 7, 3, 7}));
  EXPECT_EQ(values, (Floats{10, 10.25f, 2.5f, 2.75f, 5, 5.25f, 7.5f, 7.75f}));
}

TEST(RowsKeptApartCanBeDividedByTheGradientsThatContainThem) {
  const std::vector<VariableLayout> layout = {RowsApart(2, IdType::kInt32)};
  using Ids = std::vector<int32_t>;
  GradientBuffer buffer(layout, SparseDivisor::kGradientsWithRow);
  EXPECT_OK(buffer.Push(0, Pack(layout, {Rows(Ids{7, 3, 7}, Floats{10, 12, 20, 22, 30, 32})})));
  EXPECT_OK(buffer.Push(1, Pack(layout, {Rows(Ids{3, 0, 0}, Floats{40, 42, 50, 52, 60, 62})})));
  EXPECT_OK(buffer.Push(2, Pack(layout, {Rows(Ids{0}, Floats{600, 600})})));
  EXPECT_OK(buffer.Push(3, Pack(layout, {Rows(Ids{3, 4}, Floats{3, 6, 8, 9})})));
  PreparedUpdate prepared;
  ASSERT_OK(buffer.Prepare(Step({0, 1, 2, 3}, {1, 1, 0, 1}, 4), &prepared));
  const auto [ids, values] = WriteRows<int32_t, float>(prepared, 2);
  EXPECT_EQ(ids, (Ids{7, 3, 7, 3, 0, 0, 3, 4}));
  // Row 7 is in one gradient, twice; row 3 in three; row 0, of weight 1, in one, twice;
  // row 4 in one.
  const float third = 20.0f / 3;
  EXPECT_EQ(values,
            (Floats{10, 12, third, 22.0f / 3, 30, 32, 40.0f / 3, 14, 50, 52, 60, 62, 1, 2, 8, 9}));
}

TEST(ManyRowsKeptApartMatchAPlainLoop) {
  constexpr int64_t kRows = 300, kWidth = 3, kGradients = 5, kIds = 700;
  std::vector<VariableLayout> layout = {RowsApart(kWidth, IdType::kInt64, ValueType::kFloat64)};
  layout[0].num_rows = kRows;
  std::vector<Ints> ids(kGradients);
  std::vector<std::vector<double>> rows(kGradients);
  std::vector<std::set<int64_t>> gradients_with(kRows);
  uint64_t state = 1;
  for (size_t g = 0; g < kGradients; ++g) {
    for (int64_t i = 0; i < kIds; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      ids[g].push_back(static_cast<int64_t>(state >> 33) % kRows);
      gradients_with[static_cast<size_t>(ids[g].back())].insert(static_cast<int64_t>(g));
      for (int64_t j = 0; j < kWidth; ++j) rows[g].push_back(1.0 / static_cast<double>(i + j + 1));
    }
  }
  for (auto divisor : {SparseDivisor::kGradientsPerUpdate, SparseDivisor::kGradientsWithRow}) {
    GradientBuffer buffer(layout, divisor);
    ClosedStep step{0, {}, {}, 7};
    Ints expected_ids;
    std::vector<double> expected;
    for (size_t g = 0; g < kGradients; ++g) {
      step.ids.push_back(static_cast<int64_t>(g));
      step.weights.push_back(1);
      EXPECT_OK(buffer.Push(step.ids.back(), Pack(layout, {Rows(ids[g], rows[g])})));
      for (size_t i = 0; i < rows[g].size(); ++i) {
        const int64_t id = ids[g][i / kWidth];
        if (i % kWidth == 0) expected_ids.push_back(id);
        const size_t count = gradients_with[static_cast<size_t>(id)].size();
        const bool by_row = divisor == SparseDivisor::kGradientsWithRow;
        expected.push_back(rows[g][i] / (by_row ? static_cast<double>(count) : 7.0));
      }
    }
    PreparedUpdate prepared;
    ASSERT_OK(buffer.Prepare(step, &prepared));
    const auto [found_ids, found] = WriteRows<int64_t, double>(prepared, kWidth);
    EXPECT_EQ(found_ids == expected_ids, true);
    EXPECT_EQ(found == expected, true);
  }
}

TEST(RowsKeptApartOfHalfTypesAreDividedInFloat32AndRoundedOnce) {
  // A half type has no 2049 or 257, and would divide by 2048 or 256: 1 instead of the next below.
  struct Case {
    ValueType type;
    int64_t divisor;
    std::vector<uint16_t> values, expected;
  };
  const Case cases[] = {
      {ValueType::kFloat16, 2049, {0x6800}, {0x3bff}},                // 2048 / 2049
      {ValueType::kBFloat16, 257, {0x4380}, {0x3f7f}},                // 256 / 257
      {ValueType::kFloat16, 3, {0x3c00, 0x4200}, {0x3555, 0x3c00}},   // 1 / 3, 3 / 3
      {ValueType::kBFloat16, 3, {0x3f80, 0x4040}, {0x3eab, 0x3f80}},  // 1 / 3, 3 / 3
  };
  for (const Case& c : cases) {
    const std::vector<VariableLayout> layout = {RowsApart(1, IdType::kInt64, c.type)};
    GradientBuffer buffer(layout, SparseDivisor::kGradientsPerUpdate);
    EXPECT_OK(buffer.Push(0, Pack(layout, {Rows(Ints(c.values.size(), 4), c.values)})));
    PreparedUpdate prepared;
    ASSERT_OK(buffer.Prepare(Step({0}, {1}, c.divisor), &prepared));
    EXPECT_EQ((WriteRows<int64_t, uint16_t>(prepared, 1).second), c.expected);
  }
}

TEST(RowsKeptApartOfAStepOfOnlyWeightZeroAreNone) {
  for (auto divisor : {SparseDivisor::kGradientsPerUpdate, SparseDivisor::kGradientsWithRow}) {
    GradientBuffer buffer({RowsApart(2)}, divisor);
    PreparedUpdate prepared;
    ASSERT_OK(buffer.Prepare(Step({0, 1}, {0, 0}, 2), &prepared));
    EXPECT_EQ((WriteRows<int64_t, float>(prepared, 2).first), Ints{});
  }
}

TEST(BufferOfMergedRowsRefusesRowsKeptApart) {
  std::vector<VariableLayout> layout = {RowsApart(1)};
  const Block block = Pack(layout, {Rows(Ints{1}, Floats{2})});
  layout[0].merge_rows = true;
  GradientBuffer buffer(layout, SparseDivisor::kGradientsPerUpdate);
  EXPECT_ERROR(buffer.Push(3, block), StatusCode::kInvalidArgument,
               "Gradient of token 3: Variable 0: expected row kind 0, found 1");
  EXPECT_EQ(buffer.stats().num_gradients, 0);
}

// ---- Weights, order, memory ----

TEST(GradientOfWeightZeroIsSkippedEvenIfItIsNotANumber) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  GradientBuffer buffer(Layout(), SparseDivisor::kGradientsPerUpdate);
  EXPECT_OK(buffer.Push(0, Gradient({nan, nan}, {1, 2}, {nan, nan})));
  EXPECT_OK(buffer.Push(1, Gradient({2, 4}, {2}, {6})));
  PreparedUpdate prepared;
  ASSERT_OK(buffer.Prepare(Step({0, 1}, {0, 1}, 2), &prepared));
  const Update update = Write(prepared);
  EXPECT_EQ(update.dense, (Floats{1, 2}));
  EXPECT_EQ(update.ids, (Ints{2}));
  EXPECT_EQ(update.rows, (Floats{3}));
}

TEST(StepOfOnlyWeightZeroGivesZerosAndNoRows) {
  for (auto divisor : {SparseDivisor::kGradientsPerUpdate, SparseDivisor::kGradientsWithRow}) {
    GradientBuffer buffer(Layout(), divisor);
    PreparedUpdate prepared;  // Gradients of weight 0 need not be here.
    ASSERT_OK(buffer.Prepare(Step({0, 1}, {0, 0}, 2), &prepared));
    const Update update = Write(prepared);
    EXPECT_EQ(update.dense, (Floats{0, 0}));
    EXPECT_EQ(update.ids, Ints{});
  }
}

TEST(SumIsFormedInTokenIdOrderWhateverTheOrderOfPushes) {
  // In float32 only ((1e8 + 1) - 1e8) + 1 is 1: other orders give 0 or 2.
  const Floats values = {1e8f, 1, -1e8f, 1};
  std::vector<size_t> order = {0, 1, 2, 3};
  do {
    GradientBuffer buffer(Layout(), SparseDivisor::kGradientsPerUpdate);
    for (size_t i : order) {
      EXPECT_OK(buffer.Push(static_cast<int64_t>(i), Gradient({values[i], 0}, {4}, {values[i]})));
    }
    PreparedUpdate prepared;
    ASSERT_OK(buffer.Prepare(Step({0, 1, 2, 3}, {1, 1, 1, 1}, 1), &prepared));
    const Update update = Write(prepared);
    EXPECT_EQ(update.dense, (Floats{1, 0}));
    EXPECT_EQ(update.rows, (Floats{1}));
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(PushOfTheSameIdReplacesTheGradient) {
  GradientBuffer buffer(Layout(), SparseDivisor::kGradientsPerUpdate);
  EXPECT_OK(buffer.Push(0, Gradient({1, 1}, {}, {})));
  EXPECT_EQ(buffer.stats().num_bytes, 3 * 64);  // No ids and rows: their sections are empty.
  EXPECT_OK(buffer.Push(0, Gradient({2, 2}, {9}, {1})));
  EXPECT_EQ(buffer.stats().num_gradients, 1);
  EXPECT_EQ(buffer.stats().num_bytes, kBlockBytes);
  PreparedUpdate prepared;
  ASSERT_OK(buffer.Prepare(Step({0}, {1}, 1), &prepared));
  EXPECT_EQ(Write(prepared).dense, (Floats{2, 2}));
}

TEST(BlockIsKeptNotCopiedAndFreedWithTheLastUser) {
  GradientBuffer buffer(Layout(), SparseDivisor::kGradientsPerUpdate);
  Block block = Gradient({1, 2}, {}, {});
  const void* data = block.data;
  std::weak_ptr<const void> memory = block.owner;
  EXPECT_OK(buffer.Push(0, std::move(block)));
  block = Block();
  EXPECT_EQ(buffer.Snapshot()[0].second.data, data);
  {
    PreparedUpdate prepared;
    ASSERT_OK(buffer.Prepare(Step({0}, {1}, 1), &prepared));
    buffer.Release(Step({0}, {1}, 1), 1, {});
    EXPECT_EQ(buffer.stats().num_gradients, 0);
    EXPECT_EQ(Write(prepared).dense, (Floats{1, 2}));
    EXPECT_EQ(memory.expired(), false);
  }
  EXPECT_EQ(memory.expired(), true);
}

TEST(PushRefusesABlockThatDoesNotFitAndKeepsNothing) {
  GradientBuffer buffer(Layout(), SparseDivisor::kGradientsPerUpdate);
  Block block = Gradient({1, 2}, {}, {});
  block.num_bytes -= 64;
  EXPECT_ERROR(buffer.Push(3, block), StatusCode::kInvalidArgument, "Gradient of token 3: ");
  EXPECT_EQ(buffer.stats().num_gradients, 0);
}

TEST(MissingGradientIsNamed) {
  GradientBuffer buffer(Layout(), SparseDivisor::kGradientsPerUpdate);
  EXPECT_OK(buffer.Push(1, Gradient({1, 2}, {}, {})));
  PreparedUpdate prepared;
  EXPECT_ERROR(buffer.Prepare(Step({1, 4}, {1, 1}, 2, 7), &prepared), StatusCode::kNotFound,
               "Global step 7: expected the gradient of token 4, found none");
}

TEST(ImpossibleStepIsRefused) {
  GradientBuffer buffer(Layout(), SparseDivisor::kGradientsPerUpdate);
  PreparedUpdate p;
  const auto error = StatusCode::kInvalidArgument;
  EXPECT_ERROR(buffer.Prepare(Step({1, 2}, {1}, 2), &p), error, "2 tokens and 1 weights");
  EXPECT_ERROR(buffer.Prepare(Step({1}, {1}, 0), &p), error, "divisor of at least 1, found 0");
  EXPECT_ERROR(buffer.Prepare(Step({2, 1}, {1, 1}, 2), &p), error, "found 1 after 2");
  EXPECT_ERROR(buffer.Prepare(Step({1, 1}, {1, 1}, 2), &p), error, "found 1 after 1");
  EXPECT_ERROR(buffer.Prepare(Step({1}, {0.5f}, 2), &p), error, "weights of 0 or 1, found 0.5");
}

Ints Kept(const GradientBuffer& buffer) {
  Ints ids;
  for (const auto& [id, block] : buffer.Snapshot()) ids.push_back(id);
  return ids;
}

TEST(ReleaseFreesTheStepAndWhatWillNeverBeUsed) {
  GradientBuffer buffer(Layout(), SparseDivisor::kGradientsPerUpdate);
  for (int64_t id = 0; id < 8; ++id) EXPECT_OK(buffer.Push(id, Gradient({1, 2}, {}, {})));
  // 1 and 6 applied; 2 and 4 closed and not applied; 0 and 3 abandoned; 5 and 7 may be used.
  buffer.Release(Step({1, 6}, {1, 1}, 2), 5, {Step({2, 4}, {1, 1}, 2)});
  EXPECT_EQ(Kept(buffer), (Ints{2, 4, 5, 7}));
  EXPECT_EQ(buffer.stats().num_bytes, 4 * 3 * 64);
  buffer.Release(Step({2, 4}, {1, 1}, 2), 8, {});
  EXPECT_EQ(Kept(buffer), Ints{});
  EXPECT_EQ(buffer.stats().num_bytes, 0);
}

TEST(DropFreesGivenUpGradientsAndIgnoresUnknownOnes) {
  GradientBuffer buffer(Layout(), SparseDivisor::kGradientsPerUpdate);
  for (int64_t id = 0; id < 3; ++id) EXPECT_OK(buffer.Push(id, Gradient({1, 2}, {}, {})));
  buffer.Drop({1, 99, -5});
  EXPECT_EQ(Kept(buffer), (Ints{0, 2}));
}

TEST(SnapshotRestoresIntoAnotherBufferAtAnyAddress) {
  GradientBuffer buffer(Layout(), SparseDivisor::kGradientsPerUpdate);
  EXPECT_OK(buffer.Push(0, Gradient({1, 2}, {7, 3}, {10, 20})));
  EXPECT_OK(buffer.Push(9, Gradient({3, 5}, {3, 0}, {40, 50})));
  std::vector<std::pair<gba::TokenId, Block>> saved;
  for (const auto& [id, block] : buffer.Snapshot()) {
    auto bytes = std::make_shared<std::string>("x");  // Shifts the block by one byte.
    bytes->append(static_cast<const char*>(block.data), block.num_bytes);
    saved.push_back({id, {bytes->data() + 1, block.num_bytes, bytes}});
  }
  GradientBuffer restored(Layout(), SparseDivisor::kGradientsPerUpdate);
  EXPECT_OK(restored.Push(1, Gradient({0, 0}, {}, {})));
  EXPECT_OK(restored.Restore(saved));
  EXPECT_EQ(Kept(restored), (Ints{0, 9}));
  EXPECT_EQ(restored.stats().num_bytes, 2 * kBlockBytes);
  PreparedUpdate prepared;
  ASSERT_OK(restored.Prepare(Step({0, 9}, {1, 1}, 2), &prepared));
  const Update update = Write(prepared);
  EXPECT_EQ(update.dense, (Floats{2, 3.5f}));
  EXPECT_EQ(update.ids, (Ints{0, 3, 7}));
  EXPECT_EQ(update.rows, (Floats{25, 30, 5}));
}

TEST(RestoreChangesNothingOnAnError) {
  GradientBuffer buffer(Layout(), SparseDivisor::kGradientsPerUpdate);
  EXPECT_OK(buffer.Push(1, Gradient({0, 0}, {}, {})));
  const Block good = Gradient({1, 2}, {}, {});
  EXPECT_ERROR(buffer.Restore({{5, good}, {6, {"", 0, nullptr}}}), StatusCode::kInvalidArgument,
               "Gradient of token 6");
  EXPECT_ERROR(buffer.Restore({{5, good}, {5, good}}), StatusCode::kInvalidArgument,
               "found token 5 twice");
  EXPECT_EQ(Kept(buffer), (Ints{1}));
  EXPECT_EQ(buffer.stats().num_bytes, 3 * 64);
}

TEST(SumsAreFormedWhileOthersPushAndDrop) {
  GradientBuffer buffer(Layout(), SparseDivisor::kGradientsPerUpdate);
  EXPECT_OK(buffer.Push(0, Gradient({1, 2}, {1}, {3})));
  EXPECT_OK(buffer.Push(1, Gradient({3, 4}, {1}, {5})));
  std::thread other([&] {
    for (int64_t i = 0; i < 500; ++i) {
      EXPECT_OK(buffer.Push(10 + i, Gradient({9, 9}, {9}, {9})));
      EXPECT_OK(buffer.Push(0, Gradient({1, 2}, {1}, {3})));  // A repeated push.
      buffer.Drop({10 + i});
    }
  });
  for (int i = 0; i < 500; ++i) {
    PreparedUpdate prepared;
    ASSERT_OK(buffer.Prepare(Step({0, 1}, {1, 1}, 2), &prepared));
    const Update update = Write(prepared);
    EXPECT_EQ(update.dense, (Floats{2, 3}));
    EXPECT_EQ(update.rows, (Floats{4}));
  }
  other.join();
  EXPECT_EQ(buffer.stats().num_gradients, 2);
}

}  // namespace
