#include "arrays.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstring>
#include <set>
#include <string_view>

#include <nlohmann/json.hpp>

#include "api.h"

namespace tool {
namespace {

using Json = nlohmann::json;

struct DTypeRow {
  const char* name;
  const char* numpy;
  const char* safetensors;
  const char* npy;  // npy descriptor without byte order
  int dtype;
  size_t size;
};
constexpr DTypeRow kDTypes[] = {
    {"f32", "float32", "F32", "f4", WHALE_F32, 4},    {"f64", "float64", "F64", "f8", WHALE_F64, 8},
    {"bf16", "bfloat16", "BF16", "-", WHALE_BF16, 2}, {"f16", "float16", "F16", "f2", WHALE_F16, 2},
    {"i32", "int32", "I32", "i4", WHALE_I32, 4},      {"i64", "int64", "I64", "i8", WHALE_I64, 8},
    {"u8", "uint8", "U8", "u1", WHALE_U8, 1},         {"i8", "int8", "I8", "i1", WHALE_I8, 1},
    {"bool", "bool", "BOOL", "b1", WHALE_BOOL, 1},    {"u16", "uint16", "U16", "u2", WHALE_U16, 2},
};
const DTypeRow& row_of(int dtype) {
  for (const DTypeRow& row : kDTypes)
    if (row.dtype == dtype) return row;
  throw Failure("unknown dtype " + std::to_string(dtype));
}

// ---- what a file is
struct Known {
  std::string_view magic;
  size_t at;
  const char* is;  // "'x' IS"
};
using namespace std::string_view_literals;
constexpr Known kRefused[] = {
    {"\x1f\x8b"sv, 0, "compressed by gzip; unpack it first: gunzip FILE"},
    {"\x28\xb5\x2f\xfd"sv, 0, "compressed by zstd; unpack it first: unzstd FILE"},
    {"BZh"sv, 0, "compressed by bzip2; unpack it first: bunzip2 FILE"},
    {"\xfd"
     "7zXZ"sv,
     0, "compressed by xz; unpack it first: unxz FILE"},
    {"\x04\x22\x4d\x18"sv, 0, "compressed by lz4; unpack it first: unlz4 FILE"},
    {"7z\xbc\xaf"sv, 0, "a 7z archive; unpack it first"},
    {"ustar"sv, 257, "a tar archive; unpack it first: tar xf FILE"},
    {"\xff\xfe\0\0"sv, 0, "text in UTF-32; convert it first: iconv -f UTF-32 -t UTF-8 FILE"},
    {"\xff\xfe"sv, 0, "text in UTF-16; convert it first: iconv -f UTF-16 -t UTF-8 FILE"},
    {"\xfe\xff"sv, 0, "text in UTF-16; convert it first: iconv -f UTF-16 -t UTF-8 FILE"},
    {"\x89HDF\r\n"sv, 0, "an HDF5 file; write its arrays with numpy.savez"},
    {"PAR1"sv, 0, "a Parquet file; write its columns as arrays with numpy.savez"},
    {"ARROW1"sv, 0, "an Arrow file; write its columns as arrays with numpy.savez"},
    {"SQLite format 3"sv, 0, "an SQLite database; write its columns as arrays with numpy.savez"},
    {"%PDF"sv, 0, "a PDF; extract its text first"},
    {"\x89PNG"sv, 0, "an image; write images as an array with numpy.savez"},
    {"\xff\xd8\xff"sv, 0, "an image; write images as an array with numpy.savez"},
    {"\x7f"
     "ELF"sv,
     0, "a program"},
    {"WHG1"sv, 4, "a model, not data"},
    {"WHP1"sv, 4, "a plan, not data"},
};

bool has(const std::string& content, std::string_view magic, size_t at = 0) {
  return content.size() >= at + magic.size() && content.compare(at, magic.size(), magic) == 0;
}

// Eight bytes of header size, then JSON.
bool is_safetensors(const std::string& content) {
  if (content.size() < 10 || content[8] != '{') return false;
  uint64_t header;
  std::memcpy(&header, content.data(), 8);
  return header >= 2 && header <= content.size() - 8;
}

std::string extension(const std::string& path) {
  const size_t dot = path.rfind('.');
  if (dot == std::string::npos || path.find('/', dot) != std::string::npos) return {};
  std::string out = path.substr(dot);
  std::transform(out.begin(), out.end(), out.begin(), [](unsigned char c) { return std::tolower(c); });
  return out;
}

bool is_control(unsigned char c) {  // what no text has; tab, line ends, form feed, escape, Ctrl-Z are in some
  return c < 0x20 && c != '\t' && c != '\n' && c != '\v' && c != '\f' && c != '\r' && c != '\b' && c != 0x1a &&
         c != 0x1b;
}

// ---- npy and npz
template <class T>
T read_le(const std::string& data, size_t at, const std::string& path) {
  if (at > data.size() || sizeof(T) > data.size() - at)
    throw Failure("'" + shown(path) + "' ends early: it was cut off");
  T value;
  std::memcpy(&value, data.data() + at, sizeof(T));
  return value;
}

// Elements of a shape, at most `limit`; -1: more, or a negative extent.
int64_t checked_count(const std::vector<int64_t>& dims, uint64_t limit) {
  uint64_t n = 1;
  for (const int64_t d : dims) {
    if (d < 0) return -1;
    if (d == 0) return 0;
  }
  for (const int64_t d : dims) {
    if (static_cast<uint64_t>(d) > limit / n) return -1;
    n *= static_cast<uint64_t>(d);
  }
  return static_cast<int64_t>(n);
}

// What stands behind 'KEY': in the header's dictionary, up to the end of a string, a tuple or a word.
std::string npy_value(const std::string& header, const char* key) {
  const size_t at = header.find("'" + std::string(key) + "':");
  if (at == std::string::npos) return {};
  const size_t begin = header.find_first_not_of(' ', at + std::strlen(key) + 3);
  if (begin == std::string::npos) return {};
  const char open = header[begin];
  const size_t end = open == '(' || open == '[' ? header.find(open == '(' ? ')' : ']', begin)
                     : open == '\''             ? header.find('\'', begin + 1)
                                                : header.find_first_of(",} ", begin) - 1;
  return end == std::string::npos ? std::string() : header.substr(begin, end - begin + 1);
}

Array parse_npy(const std::string& name, std::string_view data, const std::string& path) {
  const std::string where =
      name.empty() ? "'" + shown(path) + "'" : "'" + shown(path) + "': array '" + shown(name) + "'";
  if (data.size() < 12 || data.compare(0, 6, "\x93NUMPY") != 0) throw Failure(where + " is not an npy array");
  const bool wide = data[6] >= 2;
  uint32_t header_size = 0;
  std::memcpy(&header_size, data.data() + 8, wide ? 4 : 2);
  const size_t begin = wide ? 12 : 10;
  if (header_size > data.size() - begin) throw Failure(where + " ends early: it was cut off");
  const std::string header(data.substr(begin, header_size));
  const std::string order = npy_value(header, "fortran_order"), type = npy_value(header, "descr"),
                    shape = npy_value(header, "shape");
  if ((order != "False" && order != "True") || type.empty() || shape.size() < 2 || shape[0] != '(')
    throw Failure(where + " has a broken header");
  Array array{name, 0, {}, {}};
  for (const DTypeRow& row : kDTypes)
    if (type == "'<" + std::string(row.npy) + "'" || type == "'|" + std::string(row.npy) + "'") array.dtype = row.dtype;
  if (order == "True")
    array.unread = where + " is in Fortran order; save np.ascontiguousarray(x)";
  else if (type.starts_with("'>"))
    array.unread = where + " is big-endian; save x.astype(x.dtype.newbyteorder('<'))";
  else if (array.dtype == 0)
    array.unread = where + " has dtype " + shown(type, 80) + ", which no input takes";
  if (!array.unread.empty()) return array;
  for (size_t at = 1; at + 1 < shape.size();) {
    const size_t end = std::min(shape.find(',', at), shape.size() - 1);
    std::string number = shape.substr(at, end - at);
    number.erase(std::remove(number.begin(), number.end(), ' '), number.end());
    at = end + 1;
    if (number.empty() && at + 1 >= shape.size()) break;  // "(3,)"
    if (number.empty() || number.size() > 18 || number.find_first_not_of("0123456789") != std::string::npos)
      throw Failure(where + " has a broken shape: " + shown(shape, 80));
    array.dims.push_back(std::stoll(number));
  }
  const size_t rest = data.size() - begin - header_size, size = size_of(array.dtype);
  const int64_t n = checked_count(array.dims, rest / size);
  if (n < 0 || static_cast<size_t>(n) * size != rest)
    throw Failure(where + " has " + std::to_string(rest) + " bytes of data, its shape " + shown(shape, 80) +
                  " needs others: it is damaged or was cut off");
  array.bytes.assign(data.end() - static_cast<std::ptrdiff_t>(rest), data.end());
  return array;
}

// Of a zip member's numbers, those that are all ones stand in its zip64 extra field (number 1), in this order.
void widen(std::string_view extra, std::initializer_list<uint64_t*> numbers) {
  const auto half = [&](size_t at) {
    uint16_t value;
    std::memcpy(&value, extra.data() + at, sizeof value);
    return value;
  };
  for (size_t at = 0; at + 4 <= extra.size(); at += 4u + half(at + 2)) {
    if (half(at) != 1) continue;
    const std::string_view field = extra.substr(at + 4, half(at + 2));
    size_t next = 0;
    for (uint64_t* number : numbers)
      if (*number == 0xFFFFFFFFu && next + 8 <= field.size()) std::memcpy(number, field.data() + next, 8), next += 8;
    return;
  }
}

// CRC-32 of zip (ISO 3309).
uint32_t crc32(std::string_view data) {
  static constexpr auto kTable = [] {
    std::array<uint32_t, 256> table{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t crc = byte;
      for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
      table[byte] = crc;
    }
    return table;
  }();
  uint32_t crc = ~0u;
  for (const char c : data) crc = crc >> 8 ^ kTable[(crc ^ static_cast<unsigned char>(c)) & 255];
  return ~crc;
}

Failure twice_in(const std::string& path, const std::string& name) {
  return Failure("'" + shown(path) + "' holds array '" + shown(name) +
                 "' twice, and which of the two is meant it does not say; write it again with one");
}

// The header of a safetensors file, which must not have a name twice.
Json parse_header(const std::string& path, std::string_view text) {
  std::set<std::string> names;
  std::string twice;
  const auto found = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth == 1 && event == Json::parse_event_t::key && !names.insert(parsed.get<std::string>()).second)
      twice = parsed.get<std::string>();
    return true;
  };
  Json header = Json::parse(text.begin(), text.end(), found, false);
  if (!header.is_object()) throw Failure("'" + shown(path) + "' has a broken header");
  if (!twice.empty()) throw twice_in(path, twice);
  return header;
}

}  // namespace

size_t size_of(int dtype) { return row_of(dtype).size; }
const char* numpy_name(int dtype) { return row_of(dtype).numpy; }

int parse_dtype(const std::string& name) {
  for (const DTypeRow& row : kDTypes)
    if (name == row.name || name == row.numpy) return row.dtype;
  throw Failure("unknown dtype '" + name + "'");
}

int64_t count(const std::vector<int64_t>& dims) {
  int64_t n = 1;
  for (const int64_t d : dims) n *= d;
  return n;
}

std::string shape_text(const std::vector<int64_t>& dims) {
  std::string out = "[";
  for (const int64_t d : dims) out += (out.size() > 1 ? ", " : "") + std::to_string(d);
  return out + "]";
}

DataKind kind_of_data(const std::string& path, const std::string& content) {
  const auto refuse = [&](const std::string& is) { return Failure("'" + shown(path) + "' is " + is); };
  if (content.empty()) throw refuse("empty");
  DataKind kind = DataKind::kText;
  if (has(content, "\x93NUMPY"))
    kind = DataKind::kNpy;
  else if (has(content, "PK\x03\x04") || has(content, "PK\x05\x06"))
    kind = DataKind::kNpz;
  else if (is_safetensors(content))
    kind = DataKind::kSafetensors;
  if (kind != DataKind::kText) return kind;
  for (const Known& known : kRefused)
    if (has(content, known.magic, known.at)) {
      std::string is = known.is;
      if (const size_t file = is.find("FILE"); file != std::string::npos) is.replace(file, 4, path);
      throw refuse(is);
    }
  for (const char* promised : {".npz", ".npy", ".safetensors"})
    if (extension(path) == promised)
      throw Failure("'" + shown(path) + "' does not hold what its name says: no " + (promised + 1) +
                    " file begins like this; it is damaged or something else");
  const auto control = std::find_if(content.begin(), content.end(), is_control);
  if (control != content.end())
    throw Failure("'" + shown(path) + "' is neither text nor a file of arrays (byte " +
                  std::to_string(static_cast<int>(*control)) + " at position " +
                  std::to_string(control - content.begin()) +
                  "); text must be UTF-8 or ASCII, arrays .npz or .safetensors");
  for (size_t at = 0, n = 0; at < content.size(); at += n)
    if ((n = character_at(content, at)) == 0)
      throw Failure("'" + shown(path) + "' is text, but not UTF-8: no character is byte " +
                    std::to_string(static_cast<unsigned char>(content[at])) + " at position " + std::to_string(at) +
                    " and what follows it. Convert it first: iconv -f LATIN1 -t UTF-8 FILE, with its own encoding; "
                    "iconv -c -f UTF-8 -t UTF-8 FILE drops what is damaged or cut off");
  return kind;
}

std::map<std::string, Array> read_npy(const std::string& path, const std::string& content) {
  return {{"", parse_npy("", content, path)}};
}

// numpy.savez writes a zip whose members are stored, not compressed. The central directory at the end lists them;
// numbers that do not fit its fields (zip64: files from 2 GiB, or as the writer likes) stand beside it and are all ones
// in it.
std::map<std::string, Array> read_npz(const std::string& path, const std::string& data) {
  const size_t end = data.rfind("PK\x05\x06");
  if (end == std::string::npos)
    throw Failure("'" + shown(path) + "' has no directory of its members at its end: it was cut off");
  uint64_t members = read_le<uint16_t>(data, end + 10, path), at = read_le<uint32_t>(data, end + 16, path);
  if (end >= 20 && has(data, "PK\x06\x07", end - 20)) {
    const auto wide = read_le<uint64_t>(data, end - 12, path);
    if (read_le<uint32_t>(data, wide, path) != 0x06064b50u)
      throw Failure("'" + shown(path) + "' is damaged: its zip64 directory is not where its end says");
    members = read_le<uint64_t>(data, wide + 32, path), at = read_le<uint64_t>(data, wide + 48, path);
  }
  std::map<std::string, Array> arrays;
  for (uint64_t i = 0; i < members; ++i) {
    if (read_le<uint32_t>(data, at, path) != 0x02014b50u) throw Failure("'" + shown(path) + "' has a broken directory");
    const auto flags = read_le<uint16_t>(data, at + 8, path), method = read_le<uint16_t>(data, at + 10, path);
    const auto crc = read_le<uint32_t>(data, at + 16, path);
    const auto name_size = read_le<uint16_t>(data, at + 28, path), extra = read_le<uint16_t>(data, at + 30, path),
               comment = read_le<uint16_t>(data, at + 32, path);
    uint64_t size = read_le<uint32_t>(data, at + 24, path), packed = read_le<uint32_t>(data, at + 20, path),
             local = read_le<uint32_t>(data, at + 42, path);
    if (name_size + size_t{extra} > data.size() - at - 46)
      throw Failure("'" + shown(path) + "' ends early: it was cut off");
    widen(std::string_view(data).substr(at + 46 + name_size, extra), {&size, &packed, &local});
    std::string name = data.substr(at + 46, name_size);
    if (!name.ends_with(".npy"))
      throw Failure("'" + shown(path) + "' is a zip file, but not of arrays: it holds '" + shown(name) +
                    "'. Write arrays with numpy.savez" +
                    (name.ends_with("data.pkl") ? " (this one is PyTorch's: save {k: v.numpy() ...})" : ""));
    if (flags & 1) throw Failure("'" + shown(path) + "' is encrypted");
    if (method != 0)
      throw Failure("'" + shown(path) + "' is compressed; write it with numpy.savez instead of savez_compressed");
    if (read_le<uint32_t>(data, local, path) != 0x04034b50u)
      throw Failure("'" + shown(path) + "' is damaged: '" + shown(name) + "' is not where the directory says");
    const size_t start =
        local + 30 + read_le<uint16_t>(data, local + 26, path) + read_le<uint16_t>(data, local + 28, path);
    if (packed != size || start > data.size() || size > data.size() - start)
      throw Failure("'" + shown(path) + "' ends early: it was cut off");
    const std::string_view member(data.data() + start, size);
    name.resize(name.size() - 4);
    if (crc32(member) != crc)
      throw Failure("'" + shown(path) + "' is damaged: array '" + shown(name) +
                    "' changed since it was written (its checksum differs)");
    if (!arrays.try_emplace(name, parse_npy(name, member, path)).second) throw twice_in(path, name);
    at += 46u + name_size + extra + comment;
  }
  return arrays;
}

std::map<std::string, Array> read_safetensors(const std::string& path, const std::string& data) {
  const auto header_size = read_le<uint64_t>(data, 0, path);
  if (header_size > data.size() - 8) throw Failure("'" + shown(path) + "' is not a safetensors file, or was cut off");
  const Json header = parse_header(path, std::string_view(data).substr(8, header_size));
  const uint64_t start = 8 + header_size;
  std::map<std::string, Array> arrays;
  std::vector<std::array<uint64_t, 2>> places;
  for (const auto& [name, each] : header.items()) {
    if (name == "__metadata__") continue;
    const std::string where = "'" + shown(path) + "': array '" + shown(name) + "'";
    Array array{name, 0, {}, {}};
    uint64_t begin = 0, end = 0;
    std::string dtype;
    try {
      dtype = each.at("dtype").get<std::string>();
      array.dims = each.at("shape").get<std::vector<int64_t>>();
      begin = each.at("data_offsets").at(0).get<uint64_t>();
      end = each.at("data_offsets").at(1).get<uint64_t>();
    } catch (const Json::exception&) {
      throw Failure(where + " has no dtype, shape and data_offsets");
    }
    for (const DTypeRow& row : kDTypes)
      if (dtype == row.safetensors) array.dtype = row.dtype;
    if (end < begin || end > data.size() - start)
      throw Failure(where + " lies behind the end of the file: it was cut off");
    places.push_back({begin, end});
    if (array.dtype == 0) {
      array.unread = where + " has dtype " + shown(dtype, 40) + ", which no input takes";
      arrays[name] = std::move(array);
      continue;
    }
    const uint64_t bytes = end - begin;
    const int64_t n = checked_count(array.dims, bytes / size_of(array.dtype));
    if (n < 0 || static_cast<uint64_t>(n) * size_of(array.dtype) != bytes)
      throw Failure(where + " has " + std::to_string(bytes) + " bytes, its shape " + shape_text(array.dims) +
                    " needs others");
    array.bytes.assign(data.begin() + static_cast<int64_t>(start + begin),
                       data.begin() + static_cast<int64_t>(start + end));
    arrays[name] = std::move(array);
  }
  // As the readers of checkpoints and of initial values: every byte belongs to one tensor.
  std::sort(places.begin(), places.end());
  uint64_t at = 0;
  for (const auto& [begin, end] : places) {
    if (begin != at)
      throw Failure("'" + shown(path) + "' is not a valid safetensors file: an array begins at byte " +
                    std::to_string(begin) + " of the data, expected " + std::to_string(at) +
                    ": arrays overlap or leave a hole. Write it again");
    at = end;
  }
  if (at != data.size() - start)
    throw Failure("'" + shown(path) + "' is not a valid safetensors file: its arrays have " + std::to_string(at) +
                  " bytes, it holds " + std::to_string(data.size() - start) + ". Write it again");
  return arrays;
}

}  // namespace tool
