/* The structs of DLPack 1.x that cross the C ABI of libwhale, for programs that have no dlpack.h (https://github.com/dmlc/dlpack). Where
 * that has been included, this adds nothing; to be included after this, it is not needed. */
#ifndef WHALE_DLPACK_H
#define WHALE_DLPACK_H

#ifndef DLPACK_DLPACK_H_
#define DLPACK_DLPACK_H_

#include <stdint.h>

typedef struct DLPackVersion {
  uint32_t major;
  uint32_t minor;
} DLPackVersion;
typedef struct DLDevice {
  int32_t device_type; /* 1: CPU */
  int32_t device_id;
} DLDevice;
typedef struct DLDataType {
  uint8_t code; /* 0 int, 1 uint, 2 float, 4 bfloat, 6 bool */
  uint8_t bits;
  uint16_t lanes;
} DLDataType;
typedef struct DLTensor {
  void *data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape;
  int64_t *strides;
  uint64_t byte_offset;
} DLTensor;
typedef struct DLManagedTensor {
  DLTensor dl_tensor;
  void *manager_ctx;
  void (*deleter)(struct DLManagedTensor *self);
} DLManagedTensor;
typedef struct DLManagedTensorVersioned {
  DLPackVersion version;
  void *manager_ctx;
  void (*deleter)(struct DLManagedTensorVersioned *self);
  uint64_t flags; /* bit 0: read-only */
  DLTensor dl_tensor;
} DLManagedTensorVersioned;

#endif
#endif
