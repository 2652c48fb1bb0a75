// Status, text, version.
#include <cstdlib>

#include "base/version.h"
#include "guard.h"

namespace whale::capi {
namespace {

// No destructor order to care about, and no allocation when memory has run out.
whale_status& memory_status() {
  static whale_status status{WHALE_RESOURCE_EXHAUSTED, WHALE_DAMAGE_CALL, "out of memory", {}};
  return status;
}
const whale_status& made_early = memory_status();

// Names and paths in a message may be as long as a caller likes.
constexpr size_t kLongestMessage = 4000;

whale_str view(const std::string& s) { return {s.data(), s.size()}; }

}  // namespace

whale_status* out_of_memory() noexcept { return &memory_status(); }

whale_status* out_of_memory(const char* call) noexcept {
  try {
    return make_status(error(Code::kResourceExhausted,
                             "the process has too little memory for {}; raise its limit (ulimit -v), or use fewer "
                             "devices or micro-batches, a smaller batch or a smaller model",
                             call));
  } catch (...) {
    return out_of_memory();
  }
}

whale_status* make_status(const Error& error) noexcept {
  try {
    return new whale_status{static_cast<whale_code>(error.code()), static_cast<whale_damage>(error.damage()),
                            brief(error.message(), kLongestMessage), error.where()};
  } catch (...) {
    return out_of_memory();
  }
}

whale_status* make_status(Code code, const char* message) noexcept {
  try {
    return make_status(Error(code, message));
  } catch (...) {
    return out_of_memory();
  }
}

whale_status* refused(const char* why) noexcept {
  try {
    return make_status(error(Code::kUnavailable, "the system refused what this call needs: {}", why));
  } catch (...) {
    return out_of_memory();
  }
}

whale_status* unexpected(const char* what) noexcept {
  try {
    return make_status(
        internal("libwhale met an error that it does not expect ({}): this is a bug in libwhale; please "
                 "report it with the model, the devices and the options",
                 brief(what)));
  } catch (...) {
    return out_of_memory();
  }
}

namespace {
char* made(const void* from, size_t size) {  // one byte more, 0
  auto* data = static_cast<char*>(std::malloc(size + 1));
  if (data == nullptr) throw std::bad_alloc();
  if (size > 0) std::memcpy(data, from, size);
  data[size] = '\0';
  return data;
}
}  // namespace

whale_text make_text(std::string_view s) { return {made(s.data(), s.size()), s.size()}; }
whale_bytes make_bytes(std::span<const uint8_t> bytes) {
  return {reinterpret_cast<uint8_t*>(made(bytes.data(), bytes.size())), bytes.size()};
}

}  // namespace whale::capi

using whale::capi::out_of_memory;
using whale::capi::view;

const char* whale_version(void) { return whale::kVersion; }
int32_t whale_version_number(void) { return WHALE_VERSION_NUMBER; }

whale_status* whale_abi_check(int32_t header) {
  using namespace whale::capi;  // NOLINT
  return guard([&] {
    const auto series = [](int32_t v) { return v < 1000000 ? v / 1000 : v / 1000000 * 1000; };
    if (header < 0) throw whale::invalid("argument `header_version` is {}, expected WHALE_VERSION_NUMBER", header);
    if (series(header) == series(WHALE_VERSION_NUMBER) && header <= WHALE_VERSION_NUMBER) return;
    throw whale::error(whale::Code::kFailedPrecondition,
                       "the program was compiled with whale.h {}.{}.{}, and this library is {}: {}", header / 1000000,
                       header / 1000 % 1000, header % 1000, whale::kVersion,
                       header > WHALE_VERSION_NUMBER ? "install the newer library" : "compile the program again");
  });
}

void whale_text_release(whale_text* text) {
  if (text == nullptr) return;
  std::free(text->data);
  *text = {nullptr, 0};
}

void whale_bytes_release(whale_bytes* bytes) {
  if (bytes == nullptr) return;
  std::free(bytes->data);
  *bytes = {nullptr, 0};
}

int32_t whale_status_code(const whale_status* s) { return s == nullptr ? WHALE_OK : s->code; }
int32_t whale_status_damage(const whale_status* s) { return s == nullptr ? WHALE_DAMAGE_CALL : s->damage; }
whale_str whale_status_message(const whale_status* s) { return s == nullptr ? whale_str{"", 0} : view(s->message); }
whale_str whale_status_op(const whale_status* s) { return s == nullptr ? whale_str{"", 0} : view(s->where.op); }
whale_str whale_status_scope(const whale_status* s) { return s == nullptr ? whale_str{"", 0} : view(s->where.scope); }
int32_t whale_status_rank(const whale_status* s) { return s == nullptr ? -1 : s->where.rank; }
int32_t whale_status_device(const whale_status* s) { return s == nullptr ? -1 : s->where.device; }
void whale_status_release(whale_status* s) {
  if (s != out_of_memory()) delete s;
}
