// Tensors outside a session, and DLPack.
#include <algorithm>
#include <cstdlib>

#include "guard.h"
#include "handles.h"
#include "whale/dlpack.h"

using namespace whale;        // NOLINT
using namespace whale::capi;  // NOLINT

namespace whale::capi {
namespace {

struct DlType {
  DType dtype;
  uint8_t code, bits;
};
constexpr DlType kDlTypes[] = {{DType::kF32, 2, 32}, {DType::kF64, 2, 64}, {DType::kBF16, 4, 16}, {DType::kF16, 2, 16},
                               {DType::kI32, 0, 32}, {DType::kI64, 0, 64}, {DType::kU8, 1, 8},    {DType::kI8, 0, 8},
                               {DType::kBool, 6, 8}, {DType::kU16, 1, 16}};

constexpr int kHostDevice = 1;         // kDLCPU
constexpr int kPinned[] = {3, 11};     // kDLCUDAHost, kDLROCMHost: the host reads and writes them as its own
constexpr uint64_t kReadOnlyFlag = 1;  // DLPACK_FLAG_BITMASK_READ_ONLY
constexpr size_t kMaxBytes = size_t{1} << 46;

DType dtype_of(const DLDataType& type) {
  for (const DlType& t : kDlTypes) {
    if (t.code == type.code && t.bits == type.bits && type.lanes == 1) return t.dtype;
  }
  throw invalid("DLPack type (code {}, {} bits, {} lanes) has no counterpart here", type.code, type.bits, type.lanes);
}

// Checks everything; the caller of this takes ownership only afterwards.
HostTensor host_of(const DLTensor& dl) {
  const auto type = static_cast<int>(dl.device.device_type);
  if (type != kHostDevice && std::ranges::find(kPinned, type) == std::end(kPinned))
    throw invalid("the DLPack tensor is on device type {}; copy it to host memory (type 1) first", type);
  if (dl.ndim < 0 || (dl.ndim > 0 && dl.shape == nullptr))
    throw invalid("the DLPack tensor has {} dimensions and no shape", dl.ndim);
  HostTensor out;
  out.dtype = dtype_of(dl.dtype);
  out.dims = checked_dims(out.dtype, dl.shape, static_cast<size_t>(dl.ndim));
  if (dl.strides != nullptr && element_count(out.dims) > 0) {
    const Dims dense = row_major_strides(out.dims);
    for (size_t i = 0; i < out.dims.size(); ++i) {
      if (out.dims[i] != 1 && dl.strides[i] != dense[i]) {
        throw invalid(
            "the DLPack tensor of shape {} is not dense row-major (stride {} of dimension {}, expected {}); make it "
            "contiguous",
            to_string(out.dims), dl.strides[i], i, dense[i]);
      }
    }
  }
  out.data = static_cast<char*>(dl.data) + (dl.data != nullptr ? dl.byte_offset : 0);
  if (out.bytes() > 0 && dl.data == nullptr)
    throw invalid("the DLPack tensor of shape {} has no data", to_string(out.dims));
  if (reinterpret_cast<uintptr_t>(out.data) % static_cast<uintptr_t>(size_of(out.dtype)) != 0) {
    throw invalid("the data of the DLPack tensor is not aligned to its elements of {} bytes", size_of(out.dtype));
  }
  return out;
}

template <class Managed>
std::unique_ptr<whale_tensor> adopt(Managed* dl, bool read_only) {
  auto tensor = std::make_unique<whale_tensor>();
  tensor->host = host_of(dl->dl_tensor);
  tensor->dl_device = static_cast<int32_t>(dl->dl_tensor.device.device_type);
  tensor->read_only = read_only;
  // The control block is made first: when that fails, the caller still owns `dl`.
  struct Holder {
    Managed* dl = nullptr;
    ~Holder() {
      if (dl != nullptr && dl->deleter != nullptr) dl->deleter(dl);
    }
  };
  auto holder = std::make_shared<Holder>();
  tensor->storage = holder;
  holder->dl = dl;
  return tensor;
}

// What a DLPack consumer holds: the shape it points to and a share of the memory.
struct Export {
  DLManagedTensorVersioned managed{};
  Dims dims, strides;
  std::shared_ptr<void> storage;
};

}  // namespace

DType checked_dtype(int32_t dtype) {
  if (!is_valid_dtype(dtype))
    throw invalid("dtype {} is unknown, expected a whale_dtype ({} to {})", dtype, +WHALE_F32, +WHALE_U16);
  return static_cast<DType>(dtype);
}

std::optional<Precision> checked_precision(int32_t precision, const char* what) {
  constexpr Precision kPrecisions[] = {Precision::kFloat32, Precision::kBFloat16, Precision::kFloat64,
                                       Precision::kFloat16};  // from WHALE_PRECISION_F32 on
  const auto given = number<size_t>(precision, WHALE_PRECISION_DEFAULT, WHALE_PRECISION_F16, what);
  return given == 0 ? std::nullopt : std::optional(kPrecisions[given - 1]);
}

Dims checked_dims(DType dtype, const int64_t* dims, size_t rank) {
  if (rank > size_t{kMaxRank}) throw invalid("a tensor of {} dimensions; at most {} are possible", rank, kMaxRank);
  const auto span = array(dims, rank, "dims");
  Dims out(span.begin(), span.end());
  size_t bytes = static_cast<size_t>(size_of(dtype));
  for (const int64_t d : out) {
    if (d < 0) throw invalid("dims {} have a negative extent", to_string(out));
    const auto extent = static_cast<size_t>(d > 0 ? d : 1);
    if (extent > kMaxBytes / bytes) throw invalid("a tensor of dims {} is larger than any memory", to_string(out));
    bytes *= extent;
  }
  return out;
}

std::unique_ptr<whale_tensor> make_tensor(DType dtype, Dims dims) {
  auto tensor = std::make_unique<whale_tensor>();
  tensor->host.dtype = dtype;
  tensor->host.dims = std::move(dims);
  const size_t bytes = (tensor->host.bytes() + 63) / 64 * 64 + (tensor->host.bytes() == 0 ? 64 : 0);
  void* memory = std::aligned_alloc(64, bytes);
  if (memory == nullptr) {
    throw error(Code::kResourceExhausted, "no memory for a tensor of {} bytes ({} {})", bytes, name_of(dtype),
                to_string(tensor->host.dims));
  }
  tensor->storage = std::shared_ptr<void>(memory, [](void* p) { std::free(p); });
  std::memset(memory, 0, bytes);
  tensor->host.data = memory;
  return tensor;
}

}  // namespace whale::capi

whale_status* whale_tensor_create(int32_t dtype, const int64_t* dims, size_t rank, whale_tensor** out) {
  return guard([&] {
    need(out, "out");
    const DType type = checked_dtype(dtype);
    *out = make_tensor(type, checked_dims(type, dims, rank)).release();
  });
}

whale_status* whale_tensor_view(int32_t dtype, const int64_t* dims, size_t rank, void* data, whale_tensor** out) {
  return guard([&] {
    need(out, "out");
    auto tensor = std::make_unique<whale_tensor>();
    tensor->host.dtype = checked_dtype(dtype);
    tensor->host.dims = checked_dims(tensor->host.dtype, dims, rank);
    if (tensor->host.bytes() > 0) need(static_cast<char*>(data), "data");
    if (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(size_of(tensor->host.dtype)) != 0) {
      throw invalid("`data` is not aligned to its elements of {} bytes", size_of(tensor->host.dtype));
    }
    tensor->host.data = data;
    *out = tensor.release();
  });
}

whale_status* whale_tensor_from_dlpack(DLManagedTensorVersioned* dl, whale_tensor** out) {
  return guard([&] {
    need(dl, "dl");
    need(out, "out");
    if (dl->version.major != 1)
      throw error(Code::kUnimplemented, "DLPack version {} is unknown, expected 1.x", dl->version.major);
    *out = adopt(dl, (dl->flags & kReadOnlyFlag) != 0).release();
  });
}

whale_status* whale_tensor_from_dlpack_legacy(DLManagedTensor* dl, whale_tensor** out) {
  return guard([&] {
    need(dl, "dl");
    need(out, "out");
    *out = adopt(dl, false).release();
  });
}

whale_status* whale_tensor_to_dlpack(const whale_tensor* tensor, DLManagedTensorVersioned** out) {
  return guard([&] {
    need(tensor, "tensor");
    need(out, "out");
    auto e = std::make_unique<Export>();
    e->dims = tensor->host.dims;
    e->strides = row_major_strides(e->dims);
    e->storage = tensor->storage;
    DLManagedTensorVersioned& m = e->managed;
    m.version = {1, 0};
    m.flags = tensor->read_only ? kReadOnlyFlag : 0;
    m.dl_tensor.data = tensor->host.data;
    m.dl_tensor.device.device_type = static_cast<decltype(m.dl_tensor.device.device_type)>(tensor->dl_device);
    m.dl_tensor.ndim = static_cast<int32_t>(e->dims.size());
    for (const DlType& t : kDlTypes) {
      if (t.dtype == tensor->host.dtype) m.dl_tensor.dtype = {t.code, t.bits, 1};
    }
    m.dl_tensor.shape = e->dims.data();
    m.dl_tensor.strides = e->strides.data();
    m.manager_ctx = e.get();
    m.deleter = [](DLManagedTensorVersioned* self) { delete static_cast<Export*>(self->manager_ctx); };
    *out = &e.release()->managed;
  });
}

int32_t whale_tensor_dtype(const whale_tensor* t) { return t == nullptr ? 0 : static_cast<int32_t>(t->host.dtype); }
size_t whale_tensor_rank(const whale_tensor* t) { return t == nullptr ? 0 : t->host.dims.size(); }
const int64_t* whale_tensor_dims(const whale_tensor* t) { return t == nullptr ? nullptr : t->host.dims.data(); }
void* whale_tensor_data(const whale_tensor* t) { return t == nullptr ? nullptr : t->host.data; }
int32_t whale_tensor_placement(const whale_tensor* t) {
  return t == nullptr || t->dl_device == kHostDevice ? WHALE_PLACEMENT_HOST : WHALE_PLACEMENT_PINNED;
}
size_t whale_tensor_bytes(const whale_tensor* t) { return t == nullptr ? 0 : t->host.bytes(); }
void whale_tensor_release(whale_tensor* t) { delete t; }
