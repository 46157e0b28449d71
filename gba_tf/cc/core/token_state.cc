#include "gba_tf/cc/core/token_state.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace gba {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "The format is written as it is in memory");

constexpr uint64_t kMagic = 0x454b4f5441424721;  // "!GBATOKE"
constexpr int64_t kVersion = 2;
constexpr int64_t kMaxCount = int64_t{1}
                              << 62;  // No run gets there, and none can overflow from it.

uint64_t Fnv1a(const char* bytes, size_t num_bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  for (size_t i = 0; i < num_bytes; ++i) {
    hash = (hash ^ static_cast<unsigned char>(bytes[i])) * 0x100000001b3;
  }
  return hash;
}

// A name as a number of the format: its bytes, then zeros.
uint64_t Encode(const std::string& name) {
  uint64_t encoded = 0;
  std::memcpy(&encoded, name.data(), std::min(name.size(), sizeof(encoded)));
  return encoded;
}

std::string DecodeName(uint64_t encoded) {
  char bytes[sizeof(encoded) + 1] = {};
  std::memcpy(bytes, &encoded, sizeof(encoded));
  std::string name(bytes);
  for (char& c : name) {
    if (c < ' ' || c > '~') c = '?';
  }
  return name;
}

template <typename T>
void Append(T value, std::string* bytes) {
  bytes->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Reads numbers; after the first one that is not there, ok() is false and everything reads as 0.
class Reader {
 public:
  Reader(const std::string& bytes, size_t size) : bytes_(bytes), size_(size) {}

  template <typename T>
  T Next() {
    T value{};
    if (!ok_ || size_ - position_ < sizeof(T)) {
      ok_ = false;
      return value;
    }
    std::memcpy(&value, bytes_.data() + position_, sizeof(T));
    position_ += sizeof(T);
    return value;
  }
  int64_t Int() { return Next<int64_t>(); }

  // The length of a list whose items take at least `item_bytes`; no more than the rest can hold.
  int64_t Length(size_t item_bytes) {
    const int64_t length = Int();
    if (length < 0 || static_cast<uint64_t>(length) > (size_ - position_) / item_bytes) ok_ = false;
    return ok_ ? length : 0;
  }

  bool ok() const { return ok_; }
  bool AtEnd() const { return ok_ && position_ == size_; }

 private:
  const std::string& bytes_;
  const size_t size_;
  size_t position_ = 0;
  bool ok_ = true;
};

Status Contradiction(const std::string& what) {
  return Status::InvalidArgument("The saved token server state contradicts itself: " + what +
                                 ". Restore another checkpoint.");
}

Status CheckClosedStep(const ClosedStep& closed, int64_t capacity, TokenId next_id) {
  const std::string name = "step " + std::to_string(closed.step);
  if (closed.ids.empty() || closed.divisor != static_cast<int64_t>(closed.ids.size()) ||
      closed.divisor > capacity) {
    return Contradiction("expected " + name + " to have 1 to " + std::to_string(capacity) +
                         " gradients and them as its divisor, found " +
                         std::to_string(closed.ids.size()) + " and divisor " +
                         std::to_string(closed.divisor));
  }
  TokenId lowest = 0;
  for (size_t i = 0; i < closed.ids.size(); ++i) {
    if (closed.ids[i] < lowest || closed.ids[i] >= next_id) {
      return Contradiction("expected the ids of " + name + " ascending and below " +
                           std::to_string(next_id) + ", found " + std::to_string(closed.ids[i]));
    }
    lowest = closed.ids[i] + 1;
    if (closed.weights[i] != 0.0f && closed.weights[i] != 1.0f) {
      return Contradiction("expected the weights of " + name + " to be 0 or 1, found " +
                           std::to_string(closed.weights[i]));
    }
  }
  return Status();
}

Status Check(const TokenState& state, int64_t capacity) {
  // One after the other, so that no sum can overflow.
  int64_t remaining = state.next_id;
  for (int64_t count :
       {state.applied, state.decayed, state.lost, static_cast<int64_t>(state.buffered.size())}) {
    if (count < 0 || count > remaining) remaining = -1;
    if (remaining >= 0) remaining -= count;
  }
  if (remaining != 0) {
    return Contradiction("expected issued = applied + decayed + lost + buffered, found " +
                         std::to_string(state.next_id) + ", " + std::to_string(state.applied) +
                         ", " + std::to_string(state.decayed) + ", " + std::to_string(state.lost) +
                         ", " + std::to_string(state.buffered.size()));
  }
  const int64_t closed = state.applied + state.decayed;
  remaining = closed;
  for (const auto& [staleness, count] : state.staleness) {
    remaining = count < 0 || remaining < count ? -1 : remaining - count;
    if (remaining < 0) break;
  }
  if (remaining != 0) {
    return Contradiction("expected the staleness counts to add up to " + std::to_string(closed));
  }
  if (state.next_id > kMaxCount || state.global_step < 0 || state.global_step > closed) {
    return Contradiction("expected at most one closed step for each of " + std::to_string(closed) +
                         " gradients, and fewer than 2^62 tokens, found " +
                         std::to_string(state.global_step) + " steps and " +
                         std::to_string(state.next_id) + " tokens");
  }
  if (static_cast<int64_t>(state.buffered.size()) >= capacity) {
    return Contradiction("expected fewer than " + std::to_string(capacity) +
                         " buffered tokens, found " + std::to_string(state.buffered.size()));
  }
  for (const auto& [id, value] : state.buffered) {
    if (id < 0 || id >= state.next_id || value < 0) {
      return Contradiction("expected buffered ids in [0, " + std::to_string(state.next_id) +
                           ") with values of at least 0, found id " + std::to_string(id) +
                           ", value " + std::to_string(value));
    }
  }
  const int64_t num_unapplied = static_cast<int64_t>(state.unapplied.size());
  if (state.global_step < num_unapplied) {
    return Contradiction("expected at least " + std::to_string(num_unapplied) +
                         " closed steps, found " + std::to_string(state.global_step));
  }
  GlobalStep step = state.global_step - num_unapplied;
  for (const UnappliedStep& unapplied : state.unapplied) {
    if (unapplied.closed.step != step) {
      return Contradiction("expected unapplied step " + std::to_string(step) + ", found " +
                           std::to_string(unapplied.closed.step));
    }
    Status status = CheckClosedStep(unapplied.closed, capacity, state.next_id);
    if (!status.ok()) return status;
    ++step;
  }
  return Status();
}

}  // namespace

std::string EncodeTokenState(const TokenState& state, const Policy& policy) {
  std::string bytes;
  Append(kMagic, &bytes);
  Append(kVersion, &bytes);
  Append(Encode(policy.name()), &bytes);
  Append(policy.capacity(), &bytes);
  Append(state.next_id, &bytes);
  Append(state.global_step, &bytes);
  Append(state.applied, &bytes);
  Append(state.decayed, &bytes);
  Append(state.lost + static_cast<int64_t>(state.outstanding.size()), &bytes);
  Append(static_cast<int64_t>(state.staleness.size()), &bytes);
  for (const auto& [staleness, count] : state.staleness) {
    Append(staleness, &bytes);
    Append(count, &bytes);
  }
  Append(static_cast<int64_t>(state.buffered.size()), &bytes);
  for (const auto& [id, value] : state.buffered) {
    Append(id, &bytes);
    Append(value, &bytes);
  }
  Append(static_cast<int64_t>(state.unapplied.size()), &bytes);
  for (const UnappliedStep& unapplied : state.unapplied) {
    const ClosedStep& closed = unapplied.closed;
    Append(closed.step, &bytes);
    Append(closed.divisor, &bytes);
    Append(static_cast<int64_t>(closed.ids.size()), &bytes);
    for (TokenId id : closed.ids) Append(id, &bytes);
    for (float weight : closed.weights) Append(weight, &bytes);
  }
  Append(Fnv1a(bytes.data(), bytes.size()), &bytes);
  return bytes;
}

Status DecodeTokenState(const std::string& bytes, const Policy& policy, TokenState* state) {
  constexpr size_t kChecksumBytes = sizeof(uint64_t);
  if (bytes.size() < sizeof(kMagic) + sizeof(kVersion) + kChecksumBytes) {
    return Status::InvalidArgument(
        "The saved token server state is truncated: expected at least 24 bytes, found " +
        std::to_string(bytes.size()) + ". Restore another checkpoint.");
  }
  const size_t size = bytes.size() - kChecksumBytes;
  Reader reader(bytes, size);
  if (reader.Next<uint64_t>() != kMagic) {
    return Status::InvalidArgument(
        "Expected the saved state of a token server, found other bytes. Restore a checkpoint that "
        "gba_tf wrote.");
  }
  // Before the checksum: another version may well have another one.
  const int64_t version = reader.Int();
  if (version != kVersion) {
    return Status::InvalidArgument("Expected format version " + std::to_string(kVersion) +
                                   " of the saved token server state, found " +
                                   std::to_string(version) +
                                   ". Restore it with the version of gba_tf that wrote it.");
  }
  uint64_t checksum;
  std::memcpy(&checksum, bytes.data() + size, sizeof(checksum));
  if (Fnv1a(bytes.data(), size) != checksum) {
    return Status::InvalidArgument(
        "The saved token server state is damaged or truncated: its checksum does not match its " +
        std::to_string(bytes.size()) + " bytes. Restore another checkpoint.");
  }
  const uint64_t saved_policy = reader.Next<uint64_t>();
  if (saved_policy != Encode(policy.name())) {
    return Status::InvalidArgument("Expected a token server state saved with policy " +
                                   policy.name() + ", found " + DecodeName(saved_policy) +
                                   ". Go on in the mode it was saved in, or apply the buffered "
                                   "gradients before the change of modes.");
  }
  const int64_t capacity = policy.capacity();
  const int64_t saved_capacity = reader.Int();
  if (saved_capacity != capacity) {
    return Status::InvalidArgument(
        "Expected a token server state saved with " + std::to_string(capacity) +
        " gradients per update, found " + std::to_string(saved_capacity) +
        ". Use the global and local batch sizes, or workers and backup workers, it was "
        "saved with.");
  }

  TokenState read;
  read.next_id = reader.Int();
  read.global_step = reader.Int();
  read.applied = reader.Int();
  read.decayed = reader.Int();
  read.lost = reader.Int();
  for (int64_t n = reader.Length(2 * sizeof(int64_t)); n > 0; --n) {
    const int64_t staleness = reader.Int();
    read.staleness[staleness] = reader.Int();
  }
  for (int64_t n = reader.Length(2 * sizeof(int64_t)); n > 0; --n) {
    const TokenId id = reader.Int();
    read.buffered[id] = reader.Int();
  }
  for (int64_t n = reader.Length(3 * sizeof(int64_t)); n > 0; --n) {
    UnappliedStep unapplied;
    ClosedStep& closed = unapplied.closed;
    closed.step = reader.Int();
    closed.divisor = reader.Int();
    const int64_t num_ids = reader.Length(sizeof(TokenId) + sizeof(float));
    for (int64_t i = 0; i < num_ids; ++i) closed.ids.push_back(reader.Int());
    for (int64_t i = 0; i < num_ids; ++i) closed.weights.push_back(reader.Next<float>());
    unapplied.orphaned = true;
    read.unapplied.push_back(std::move(unapplied));
  }
  if (!reader.AtEnd()) return Contradiction("its lists do not fill its bytes");
  Status status = Check(read, capacity);
  if (!status.ok()) return status;
  *state = std::move(read);
  return Status();
}

}  // namespace gba
