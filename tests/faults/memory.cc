// Where buffers lie, and copies between memories.
#include <algorithm>
#include <set>

#include "fault.h"
#include "plan/memory.h"

namespace whale::test {
namespace {

bool change_buffers(Plan& plan, Dice& dice, const std::function<bool(Program&, Buffer&, Dice&)>& change) {
  Entry& entry = train_of(plan);
  for (int tries = 0; tries < 16; ++tries) {
    Program& p = entry.programs[dice.below(std::ssize(entry.programs))];
    if (p.buffers.empty()) continue;
    if (change(p, p.buffers[dice.below(std::ssize(p.buffers))], dice)) return true;
  }
  return false;
}

// Its own place in the arena, and everything that shares it.
void move_to(Program& p, Buffer& b, int64_t offset) {
  const auto id = static_cast<BufferId>(&b - p.buffers.data());
  b.offset = offset;
  for (Buffer& x : p.buffers)
    if (x.alias == id) x.offset = offset;
}
bool owns(const Buffer& b) { return b.kind == BufferKind::kArena && b.alias == kNone && b.offset >= 0 && b.bytes > 0; }

bool onto_another(Program& p, Buffer& b, Dice& dice) {
  Buffer* other = choose(p.buffers, dice, [&](const Buffer& x) {
    return owns(x) && x.memory == b.memory && x.offset != b.offset && x.versions == b.versions;
  });
  if (!owns(b) || !other) return false;
  const int64_t arena = b.memory == Memory::kHost ? p.host_bytes : p.arena_bytes;
  const int64_t all = (b.versions - 1) * ((b.bytes + kAlignment - 1) / kAlignment * kAlignment) + b.bytes;
  if (other->offset + all > arena) return false;
  move_to(p, b, other->offset);
  return true;
}

bool shift(Program& p, Buffer& b, Dice& dice) {
  if (!owns(b)) return false;
  const int64_t by = dice.coin() ? kAlignment : -kAlignment;
  const int64_t arena = b.memory == Memory::kHost ? p.host_bytes : p.arena_bytes;
  const int64_t all = (b.versions - 1) * ((b.bytes + kAlignment - 1) / kAlignment * kAlignment) + b.bytes;
  if (b.offset + by < 0 || b.offset + by + all > arena) return false;
  move_to(p, b, b.offset + by);
  return true;
}

// In the storage of a buffer of the same type.
bool other_alias(Program& p, Buffer& b, Dice& dice) {
  const auto id = static_cast<BufferId>(&b - p.buffers.data());
  if (b.kind != BufferKind::kArena || b.bytes == 0) return false;
  for (const Buffer& x : p.buffers)
    if (x.alias == id) return false;
  Buffer* other = choose(p.buffers, dice, [&](const Buffer& x) {
    return owns(x) && &x != &b && x.bytes >= b.bytes && x.versions == b.versions && x.memory == b.memory &&
           &x - p.buffers.data() != b.alias;
  });
  if (!other) return false;
  b.alias = static_cast<BufferId>(other - p.buffers.data());
  b.offset = other->offset, b.at = 0;
  return true;
}

bool other_part(Program& p, Buffer& b, Dice& dice) {
  if (b.alias == kNone) return false;
  const Buffer& whole = p.buffers[b.alias];
  const int64_t element = size_of(b.dtype), places = (whole.bytes - b.bytes) / element;
  if (places < 1) return false;
  const int64_t at = dice.below(places + 1) * element;
  if (at == b.at) return false;
  b.at = at;
  return true;
}

bool fewer_versions(Program& p, Buffer& b, Dice&) {
  if (b.versions < 2 || b.alias != kNone) return false;
  const auto id = static_cast<BufferId>(&b - p.buffers.data());
  --b.versions;
  for (Buffer& x : p.buffers)
    if (x.alias == id) x.versions = b.versions;
  return true;
}

// An operand is what it was before something changed it in place.
bool stale_operand(const Spot& s, Dice& dice) {
  BufferIds& in = s.at().in;
  for (int tries = 0; tries < 4 && !in.empty(); ++tries) {
    BufferId& b = in[dice.below(std::ssize(in))];
    if (b == kNone || s.buffer(b).alias == kNone) continue;
    for (size_t k = 0; k < s.program->buffers.size(); ++k) {
      const Buffer& x = s.program->buffers[k];
      const auto id = static_cast<BufferId>(k);
      if (id == b || storage_of(*s.program, id) != storage_of(*s.program, b) || !same_type(x, s.buffer(b)) ||
          x.at != s.buffer(b).at)
        continue;
      b = id;
      return true;
    }
  }
  return false;
}

// A copy of a value that has been made earlier is read in place of it: of another name, type alike.
bool older_copy(const Spot& s, Dice& dice) {
  const auto op = s.at().op();
  if (!s.at().copies_to(Memory::kDevice) && op != OpCode::k_all_gather && op != OpCode::k_local_slice) return false;
  const auto n = static_cast<size_t>(dice.below(std::ssize(s.at().out)));
  const BufferId now = s.at().out[n];
  for (size_t k = s.index; k-- > 0;)
    for (const BufferId b : s.segment->instructions[k].out)
      if (b != kNone && b != now && same_type(s.buffer(b), s.buffer(now)) &&
          storage_of(*s.program, b) != storage_of(*s.program, now)) {
        read_instead(*s.program, now, b, s.segment, s.index);
        return true;
      }
  return false;
}

bool is_move(const Spot& s) { return s.at().kind() == InstructionKind::kCopy; }

// One copy of a list between memories is not made.
bool drop_copy(const Spot& s, Dice& dice) {
  Instruction& i = s.at();
  const std::ptrdiff_t results = std::ssize(i.out), n = dice.below(results);
  const bool places = std::ssize(i.in) == 2 * results;
  if (results == 1) return erase_instruction(s), true;
  if (places) i.in.erase(i.in.begin() + results + n);
  i.in.erase(i.in.begin() + n), i.out.erase(i.out.begin() + n);
  return true;
}

bool swap_copies(const Spot& s, Dice& dice) {
  Instruction& i = s.at();
  for (int tries = 0; tries < 8 && i.out.size() > 1; ++tries) {
    const auto a = static_cast<size_t>(dice.below(std::ssize(i.out))), b = (a + 1) % i.out.size();
    if (i.in[a] == i.in[b] || !same_type(s.buffer(i.in[a]), s.buffer(i.in[b]))) continue;
    std::swap(i.in[a], i.in[b]);
    return true;
  }
  return false;
}

std::function<bool(Plan&, Dice&)> at(Reach reach, Wanted wanted, Change change) {
  return [=](Plan& plan, Dice& dice) { return damage(plan, dice, reach, wanted, change); };
}
std::function<bool(Plan&, Dice&)> buffer(bool (*change)(Program&, Buffer&, Dice&)) {
  return [change](Plan& plan, Dice& dice) { return change_buffers(plan, dice, change); };
}

}  // namespace

std::vector<Fault> faults_of_memory() {
  using enum Reach;
  const auto either = Catcher::kEither, verifier = Catcher::kVerifier;
  const auto any = [](const Spot&) { return true; };
  return {
      {"a buffer on another one", verifier, buffer(onto_another)},
      {"a buffer's offset", verifier, buffer(shift)},
      {"a buffer in another one's storage", either, buffer(other_alias)},
      {"another part of a storage", either, buffer(other_part)},
      {"a version less", verifier, buffer(fewer_versions)},
      {"a value before it was changed in place", verifier, at(kAny, any, stale_operand)},
      {"an older copy", either, at(kAny, any, older_copy)},
      {"a copy between memories dropped", either, at(kAny, is_move, drop_copy)},
      {"two copies between memories exchanged", either, at(kAny, is_move, swap_copies)},
  };
}

}  // namespace whale::test
