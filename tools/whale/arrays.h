// Arrays in files: what a file of data is, by its content, and what it holds.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "whale/whale.h"

namespace tool {

struct Array {
  std::string name;
  int dtype = WHALE_F32;
  std::vector<int64_t> dims;
  std::vector<uint8_t> bytes;
  std::string unread = {};  // why its numbers were not read, a message; matters for an array that an input is fed from
};

size_t size_of(int dtype);
int parse_dtype(const std::string& name);  // "f32", "float32", ...
const char* numpy_name(int dtype);         // "float32"
int64_t count(const std::vector<int64_t>& dims);
std::string shape_text(const std::vector<int64_t>& dims);  // "[4, 8]"

enum class DataKind { kText, kNpy, kNpz, kSafetensors };
// By content; the name decides nothing, but must not promise something else. Throws Failure, with what to do, for what
// whale does not read: compressed files, UTF-16, other formats, binary data, empty files.
DataKind kind_of_data(const std::string& path, const std::string& content);

// Each checks every size and offset; npz members also by their checksums. An array of a form that no input takes (text,
// objects) is `unread`; a name that is there twice is an error. One array without a name of its own: "".
std::map<std::string, Array> read_npy(const std::string& path, const std::string& content);
std::map<std::string, Array> read_npz(const std::string& path, const std::string& content);
std::map<std::string, Array> read_safetensors(const std::string& path, const std::string& content);

}  // namespace tool
