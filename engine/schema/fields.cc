#include "schema/fields.h"

#include <cmath>
#include <cstring>

#include "base/utf8.h"
#include "ops/op.h"

namespace whale::schema {
namespace {
constexpr size_t kMostAttrs = 100;
}

void Fields::spend(size_t bytes) {
  if (bytes > budget_) throw bad("it refers to the same bytes over and over, and would grow far beyond its size");
  budget_ -= bytes;
}

std::string Fields::text(const flatbuffers::String* s, const char* what) {
  if (s == nullptr) return {};
  spend(s->size());
  std::string out(s->c_str(), s->size());
  if (!is_utf8(out)) throw bad(fmt::format("{} is not UTF-8", what));
  return out;
}

std::string Fields::name(const flatbuffers::String* s, const char* what) {
  std::string out = text(s, what);
  if (!is_name(out)) throw bad(fmt::format("{} contains control characters", what));
  return out;
}

int64_t Fields::range(int64_t value, int64_t low, int64_t high, const char* what) const {
  if (value < low || value > high) throw bad(fmt::format("{} is {}, expected {} to {}", what, value, low, high));
  return value;
}

int32_t Fields::id(int64_t value, size_t count, const char* what) const {
  if (value < 0 || value >= static_cast<int64_t>(count)) {
    throw bad(fmt::format("{} refers to number {}, but there are {}", what, value, count));
  }
  return static_cast<int32_t>(value);
}

int32_t Fields::id_or_none(int64_t value, size_t count, const char* what) const {
  return value == kNone ? kNone : id(value, count, what);
}

double Fields::finite(double value, const char* what) const {
  if (!std::isfinite(value)) throw bad(fmt::format("{} is {}, expected a finite number", what, value));
  return value;
}

Dims Fields::dims(const flatbuffers::Vector<int64_t>* v, DType dtype, const char* what) {
  Dims out = vector(v);
  if (static_cast<int>(out.size()) > kMaxRank)
    throw bad(fmt::format("{} has {} dimensions, at most {} are possible", what, out.size(), kMaxRank));
  int64_t bytes = size_of(dtype);
  for (const int64_t d : out) {
    // Zero extents do not hide an overflow of the others: every partial product counts.
    if (d < 0 || d > kMaxTensorBytes || (d > 0 && bytes > kMaxTensorBytes / d)) {
      throw bad(fmt::format("{} has impossible dimensions {}", what, to_string(out)));
    }
    bytes *= d > 0 ? d : 1;
  }
  return out;
}

OpCode Fields::op_code(uint16_t number) const {
  if (!is_valid_op(number))
    throw bad(fmt::format("op number {} is unknown; the file may come from a newer version", number));
  return static_cast<OpCode>(number);
}

Attrs Fields::attrs(const flatbuffers::Vector<flatbuffers::Offset<fb::Attr>>* v) {
  Attrs out;
  if (v == nullptr) return out;
  if (v->size() > kMostAttrs) throw bad(fmt::format("an op has {} attributes, no op has so many", v->size()));
  out.reserve(v->size());
  for (const fb::Attr* a : *v) {
    std::string key = name(a->name(), "an attribute's name");
    spend(sizeof(Attr));
    Attr value;
    switch (a->kind()) {
      case fb::AttrKind::Int: value = a->i(); break;
      case fb::AttrKind::Float: value = a->f(); break;
      case fb::AttrKind::Bool: value = a->i() != 0; break;
      case fb::AttrKind::String: value = text(a->s(), "an attribute"); break;
      case fb::AttrKind::Ints: value = vector(a->ints()); break;
      case fb::AttrKind::Floats: value = vector(a->floats()); break;
      default: throw bad(fmt::format("attribute '{}' has the unknown kind {}", key, static_cast<int>(a->kind())));
    }
    if (!out.try_emplace(key, std::move(value)).second) throw bad(fmt::format("attribute '{}' is there twice", key));
  }
  return out;
}

Initializer Fields::initializer(const fb::Initializer* t) {
  Initializer out;
  if (t == nullptr) return out;
  out.kind = number<InitKind>(t->kind(), "an initializer");
  out.a = finite(t->a(), "an initializer's value");
  out.b = finite(t->b(), "an initializer's value");
  out.file = name(t->file(), "an initializer's file");
  out.key = name(t->key(), "an initializer's key");
  if (out.kind == InitKind::kData) {
    out.data_type = number<DType>(t->data_type(), "an initializer's dtype");
    out.data = std::make_shared<const std::vector<uint8_t>>(vector(t->data()));
  }
  return out;
}

Scope Fields::scope(const fb::Scope* t, size_t index) {
  Scope out;
  spend(sizeof(Scope));
  out.kind = number<ScopeKind>(t->kind(), "a scope's kind");
  if ((out.kind == ScopeKind::kRoot) != (index == 0)) throw bad("scope 0, and no other, must be the root");
  out.parent =
      index == 0 ? id_or_none(t->parent(), 0, "the root scope's parent") : id(t->parent(), index, "a scope's parent");
  out.name = name(t->name(), "a scope's name");
  out.count = range(t->count(), 0, kMaxCount, "a scope's count");
  out.shares = vector(t->shares());
  for (const double s : out.shares) {
    if (finite(s, "a share") < 0 && s != kNoDevice) throw bad("a share is negative");
  }
  out.by = name(t->by(), "a scope's `by`");
  out.factor = name(t->factor(), "a scope's factor");
  out.micro_batches = range(t->micro_batches(), 0, kMaxCount, "a scope's micro_batches");
  out.schedule = name(t->schedule(), "a scope's schedule");
  out.virtual_stages = range(t->virtual_stages(), 0, kMaxCount, "a scope's virtual stages");
  out.device_order = name(t->device_order(), "a scope's device_order");
  out.devices = name(t->devices(), "a scope's devices");
  out.nests = name(t->nests(), "what unlike replicas have inside");
  return out;
}

std::vector<Scope> Fields::scopes(const flatbuffers::Vector<flatbuffers::Offset<fb::Scope>>* v) {
  if (v == nullptr || v->size() == 0) throw bad("it has no scopes, not even the root");
  std::vector<Scope> out;
  std::vector<int> depth;
  for (const fb::Scope* s : *v) {
    out.push_back(scope(s, out.size()));
    depth.push_back(out.back().parent == kNone ? 0 : depth[out.back().parent] + 1);
    if (depth.back() > kMaxScopeDepth) throw bad(fmt::format("its scopes nest deeper than {}", kMaxScopeDepth));
  }
  return out;
}

Optimizer Fields::optimizer(const fb::Optimizer* t) const {
  Optimizer out;
  if (t == nullptr) return out;
  out.kind = number<OptimizerKind>(t->kind(), "the optimizer");
  out.learning_rate = finite(t->learning_rate(), "the learning rate");
  out.momentum = finite(t->momentum(), "the momentum");
  out.nesterov = t->nesterov();
  out.beta1 = finite(t->beta1(), "beta1");
  out.beta2 = finite(t->beta2(), "beta2");
  out.epsilon = finite(t->epsilon(), "epsilon");
  out.weight_decay = finite(t->weight_decay(), "the weight decay");
  out.decay_rate = finite(t->decay_rate(), "the decay rate");
  out.clip_threshold = finite(t->clip_threshold(), "the clip threshold");
  out.sparse_updates = t->sparse_updates();
  out.split_master_weights = t->split_master_weights();
  return out;
}

LearningRateSchedule Fields::lr_schedule(const fb::LearningRateSchedule* t) const {
  LearningRateSchedule out;
  if (t == nullptr) return out;
  out.kind = number<LrScheduleKind>(t->kind(), "the schedule of the learning rate");
  out.warmup_steps = range(t->warmup_steps(), 0, int64_t{1} << 53, "warmup_steps");
  out.total_steps = range(t->total_steps(), 0, int64_t{1} << 53, "total_steps");
  out.final_fraction = finite(t->final_fraction(), "final_fraction");
  return out;
}

const uint8_t* aligned(const uint8_t* data, size_t size, std::vector<uint64_t>& storage) {
  if (reinterpret_cast<uintptr_t>(data) % alignof(uint64_t) == 0) return data;
  storage.resize(size / sizeof(uint64_t) + 1);
  std::memcpy(storage.data(), data, size);
  return reinterpret_cast<const uint8_t*>(storage.data());
}

flatbuffers::Verifier verifier(const uint8_t* data, size_t size) {
  return flatbuffers::Verifier(data, size, /*max_depth=*/16,
                               /*max_tables=*/static_cast<flatbuffers::uoffset_t>(size / 4 + 16));
}

std::vector<uint8_t> bytes_of(const Builder& b) {
  std::vector<uint8_t> out;
  out.reserve(b.GetSize() + 64);
  out.assign(b.GetBufferPointer(), b.GetBufferPointer() + b.GetSize());
  return out;
}

// What equals the schema's default is left out, and -0 equals 0.
class NegativeZero {
 public:
  NegativeZero(Builder& b, double value) : b_(b), is_(value == 0 && std::signbit(value)) { b_.ForceDefaults(is_); }
  NegativeZero(const NegativeZero&) = delete;
  ~NegativeZero() {
    if (is_) b_.ForceDefaults(false);
  }

 private:
  Builder& b_;
  bool is_;
};

OffVector<fb::Attr> write(Builder& b, const Attrs& attrs) {
  std::vector<Off<fb::Attr>> out;
  for (const auto& [name, value] : attrs) {
    const auto* s = std::get_if<std::string>(&value);
    const auto* ints = std::get_if<Ints>(&value);
    const auto* floats = std::get_if<std::vector<double>>(&value);
    const auto name_at = b.CreateString(name.data(), name.size());
    const auto s_at = s != nullptr ? write(b, *s) : 0;
    const auto ints_at = ints != nullptr ? write(b, *ints) : 0;
    const auto floats_at = floats != nullptr ? write(b, *floats) : 0;
    fb::AttrBuilder t(b);
    t.add_name(name_at);
    if (const auto* i = std::get_if<int64_t>(&value)) t.add_kind(fb::AttrKind::Int), t.add_i(*i);
    if (const auto* f = std::get_if<double>(&value)) {
      const NegativeZero kept(b, *f);
      t.add_kind(fb::AttrKind::Float), t.add_f(*f);
    }
    if (const auto* flag = std::get_if<bool>(&value)) t.add_kind(fb::AttrKind::Bool), t.add_i(*flag ? 1 : 0);
    if (s != nullptr) t.add_kind(fb::AttrKind::String), t.add_s(s_at);
    if (ints != nullptr) t.add_kind(fb::AttrKind::Ints), t.add_ints(ints_at);
    if (floats != nullptr) t.add_kind(fb::AttrKind::Floats), t.add_floats(floats_at);
    out.push_back(t.Finish());
  }
  return write(b, out);
}

OffVector<fb::Scope> write(Builder& b, const std::vector<Scope>& scopes) {
  std::vector<Off<fb::Scope>> out;
  for (const Scope& s : scopes) {
    const auto name = write(b, s.name), by = write(b, s.by), factor = write(b, s.factor),
               schedule = write(b, s.schedule), device_order = write(b, s.device_order), devices = write(b, s.devices),
               nests = write(b, s.nests);
    out.push_back(fb::CreateScope(b, number<fb::ScopeKind>(s.kind), s.parent, name, s.count, write(b, s.shares), by,
                                  factor, s.micro_batches, schedule, s.virtual_stages, device_order, devices, nests));
  }
  return write(b, out);
}

Off<fb::Initializer> write(Builder& b, const Initializer& init) {
  const auto file = write(b, init.file), key = write(b, init.key);
  const bool data = init.kind == InitKind::kData && init.data != nullptr;
  const auto values = data ? b.CreateVector(*init.data) : Off<flatbuffers::Vector<uint8_t>>();
  const NegativeZero kept(b, init.a);
  return fb::CreateInitializer(b, number<fb::InitKind>(init.kind), init.a, init.b, file, key,
                               number<fb::DType>(init.data_type), values);
}

Off<fb::Optimizer> write(Builder& b, const Optimizer& o) {
  return fb::CreateOptimizer(b, number<fb::OptimizerKind>(o.kind), o.learning_rate, o.momentum, o.nesterov, o.beta1,
                             o.beta2, o.epsilon, o.weight_decay, o.decay_rate, o.clip_threshold, o.sparse_updates,
                             o.split_master_weights);
}

Off<fb::LearningRateSchedule> write(Builder& b, const LearningRateSchedule& s) {
  return fb::CreateLearningRateSchedule(b, number<fb::LrScheduleKind>(s.kind), s.warmup_steps, s.total_steps,
                                        s.final_fraction);
}

}  // namespace whale::schema
