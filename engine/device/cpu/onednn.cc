#include "device/cpu/onednn.h"

#include "base/error.h"

namespace whale::cpu {

std::string onednn_version() {
  const dnnl_version_t* v = dnnl_version();
  return fmt::format("{}.{}.{}", v->major, v->minor, v->patch);
}

dnnl::memory::data_type onednn_type(DType dtype) {
  switch (dtype) {
    case DType::kF32: return dnnl::memory::data_type::f32;
    case DType::kBF16: return dnnl::memory::data_type::bf16;
    case DType::kI32: return dnnl::memory::data_type::s32;
    case DType::kI8: return dnnl::memory::data_type::s8;
    case DType::kU8: return dnnl::memory::data_type::u8;
    default: throw unimplemented("oneDNN has no {} tensors", name_of(dtype));
  }
}

dnnl::memory::desc strided_desc(const Dims& dims, DType dtype, const Dims& strides) {
  return {{dims.begin(), dims.end()}, onednn_type(dtype), dnnl::memory::dims(strides.begin(), strides.end())};
}

dnnl::memory::desc plain_desc(const Dims& dims, DType dtype) {
  return strided_desc(dims, dtype, row_major_strides(dims));
}

dnnl::primitive_attr user_scratchpad() {
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  attr.set_fpmath_mode(dnnl::fpmath_mode::strict);  // whatever ONEDNN_DEFAULT_FPMATH_MODE says
  return attr;
}

dnnl::memory DnnlKernel::operand(const dnnl::memory::desc& desc, const Operand& operand) const {
  return {desc, onednn_.engine, operand.data};
}

dnnl::memory DnnlKernel::temporary(const dnnl::memory::desc& desc) {
  dnnl::memory memory(desc, onednn_.engine, nullptr);
  temporaries_.push_back({memory, scratch_bytes_});
  scratch_bytes_ += (desc.get_size() + 63) / 64 * 64;
  return memory;
}

void DnnlKernel::reorder(const dnnl::memory& from, const dnnl::memory& to) {
  const dnnl::reorder::primitive_desc pd(from, to, user_scratchpad());
  call(pd, dnnl::reorder(pd), {{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, to}});
}

dnnl::memory DnnlKernel::reordered(const dnnl::memory& from, const dnnl::memory::desc& to) {
  if (from.get_desc() == to) return from;
  dnnl::memory packed = temporary(to);
  reorder(from, packed);
  return packed;
}

void DnnlKernel::call(const dnnl::primitive& primitive, const dnnl::memory::desc& scratchpad,
                      std::initializer_list<std::pair<int, dnnl::memory>> arguments) {
  Call call{primitive, {}, {}};
  for (const auto& [index, memory] : arguments) {
    call.keep.push_back(memory);
    call.arguments.push_back({index, memory.get()});
  }
  if (scratchpad.get_size() != 0) {
    call.keep.push_back(temporary(scratchpad));
    call.arguments.push_back({DNNL_ARG_SCRATCHPAD, call.keep.back().get()});
  }
  calls_.push_back(std::move(call));
}

void DnnlKernel::set_scratch(void* scratch) {
  for (Temporary& t : temporaries_) t.memory.set_data_handle(static_cast<char*>(scratch) + t.offset);
}

void DnnlKernel::run() {
  for (const Call& call : calls_) {
    const dnnl_status_t status = dnnl_primitive_execute(call.primitive.get(), onednn_.stream.get(),
                                                        static_cast<int>(call.arguments.size()), call.arguments.data());
    if (status != dnnl_success) throw internal("oneDNN failed to run a primitive: status {}", static_cast<int>(status));
  }
}

}  // namespace whale::cpu
