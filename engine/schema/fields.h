// What the graph and the plan files share: checked reading of fields, and the tables that occur in both (tensor types,
// attributes, scopes, initializers, training). Reading trusts nothing but that flatbuffers::Verifier has passed.
#pragma once

#include <flatbuffers/flatbuffers.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "ir/graph.h"
#include "schema/graph_generated.h"

namespace whale::schema {

inline constexpr size_t kMaxFileBytes = size_t{1} << 31;  // FlatBuffers' offsets end here
inline constexpr int kMaxScopeDepth = 256;
inline constexpr int64_t kMaxTensorBytes = int64_t{1} << 46;
inline constexpr int64_t kMaxCount = int64_t{1} << 31;  // of replicas, micro-batches, steps: beyond any use

// A file may refer to the same bytes many times. Without sharing, what is read is at most the file's size; a budget of
// a few times that keeps a small file from growing into gigabytes.
class Fields {
 public:
  Fields(const char* kind, size_t file_bytes) : kind_(kind), budget_(16 * file_bytes + 65536) {}

  Error bad(const std::string& what) const { return invalid("not a valid {} file: {}", kind_, what); }
  void spend(size_t bytes);

  // Older flatbuffers verify where a vector's length stands, not its elements.
  void place(const void* data, size_t alignment) const {
    if (reinterpret_cast<uintptr_t>(data) % alignment != 0) throw bad("its data is not aligned");
  }
  // A vector of structs that may be walked; `size` is what each becomes. An empty one has no place: writers put it
  // anywhere.
  template <class T>
  void structs(const flatbuffers::Vector<const T*>* v, size_t size) {
    if (v->size() != 0) place(v->Data(), alignof(T));
    spend(size_t{v->size()} * size);
  }

  std::string text(const flatbuffers::String* s, const char* what);  // UTF-8, "" when absent
  std::string name(const flatbuffers::String* s, const char* what);  // besides: no control characters
  template <class T>
  std::vector<T> vector(const flatbuffers::Vector<T>* v) {
    if (v == nullptr) return {};
    place(v->Data(), alignof(T));
    spend(size_t{v->size()} * sizeof(T));
    return std::vector<T>(v->begin(), v->end());
  }
  int64_t range(int64_t value, int64_t low, int64_t high, const char* what) const;  // low <= value <= high
  int32_t id(int64_t value, size_t count, const char* what) const;                  // 0 <= value < count
  int32_t id_or_none(int64_t value, size_t count, const char* what) const;          // or -1
  double finite(double value, const char* what) const;
  template <class To, class From>
  To number(From value, const char* what) const {  // an enum of the schema whose numbers are those of the engine
    if (value < From::MIN || value > From::MAX)
      throw bad(fmt::format("{} has the unknown number {}", what, static_cast<int>(value)));
    return static_cast<To>(static_cast<uint8_t>(value));
  }

  Dims dims(const flatbuffers::Vector<int64_t>* v, DType dtype,
            const char* what);  // no negative extent, size in bounds
  OpCode op_code(uint16_t number) const;
  Attrs attrs(const flatbuffers::Vector<flatbuffers::Offset<fb::Attr>>* v);
  Initializer initializer(const fb::Initializer* t);
  Scope scope(const fb::Scope* t, size_t index);
  std::vector<Scope> scopes(const flatbuffers::Vector<flatbuffers::Offset<fb::Scope>>* v);
  Optimizer optimizer(const fb::Optimizer* t) const;
  LearningRateSchedule lr_schedule(const fb::LearningRateSchedule* t) const;

 private:
  const char* kind_;
  size_t budget_;
};

// The bytes at an address that scalars may be read from directly: `data` itself, or a copy in `storage` when it is not
// aligned.
const uint8_t* aligned(const uint8_t* data, size_t size, std::vector<uint64_t>& storage);
// Limits for a file of `size` bytes: an honest one has at most one table every four bytes.
flatbuffers::Verifier verifier(const uint8_t* data, size_t size);

// Writing. Empty strings and vectors are left out.
using Builder = flatbuffers::FlatBufferBuilder;
template <class T>
using Off = flatbuffers::Offset<T>;
template <class T>
using OffVector = Off<flatbuffers::Vector<Off<T>>>;

// What was built, with room for a checksum behind it.
std::vector<uint8_t> bytes_of(const Builder& b);

inline Off<flatbuffers::String> write(Builder& b, const std::string& s) {
  return s.empty() ? Off<flatbuffers::String>() : b.CreateString(s.data(), s.size());
}
template <class T>
Off<flatbuffers::Vector<T>> write(Builder& b, const std::vector<T>& v) {
  return v.empty() ? Off<flatbuffers::Vector<T>>() : b.CreateVector(v.data(), v.size());
}
template <class T, uint32_t N>
Off<flatbuffers::Vector<T>> write(Builder& b, const SmallVector<T, N>& v) {
  return v.empty() ? Off<flatbuffers::Vector<T>>() : b.CreateVector(v.data(), v.size());
}
template <class T>
OffVector<T> write(Builder& b, const std::vector<Off<T>>& v) {
  return v.empty() ? OffVector<T>() : b.CreateVector(v.data(), v.size());
}
// The same enum in the schema's type.
template <class To, class From>
To number(From value) {
  return static_cast<To>(static_cast<uint8_t>(value));
}
OffVector<fb::Attr> write(Builder& b, const Attrs& attrs);
OffVector<fb::Scope> write(Builder& b, const std::vector<Scope>& scopes);
Off<fb::Initializer> write(Builder& b, const Initializer& init);
Off<fb::Optimizer> write(Builder& b, const Optimizer& o);
Off<fb::LearningRateSchedule> write(Builder& b, const LearningRateSchedule& s);

}  // namespace whale::schema
