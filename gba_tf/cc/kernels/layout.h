// TensorFlow dtypes and op attributes -> the core's variable layout.
#ifndef GBA_TF_CC_KERNELS_LAYOUT_H_
#define GBA_TF_CC_KERNELS_LAYOUT_H_

#include <vector>

#include "absl/status/status.h"
#include "gba_tf/cc/core/packed_gradient.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/types.h"

namespace gba {

absl::Status ToValueType(tensorflow::DataType dtype, ValueType* value_type);
tensorflow::DataType ToDataType(ValueType value_type);
absl::Status ToIdType(tensorflow::DataType dtype, IdType* id_type);
tensorflow::DataType ToDataType(IdType id_type);

// Reads the list attributes of GbaGradientBuffer.
absl::Status BufferLayoutFromAttributes(tensorflow::OpKernelConstruction* construction,
                                        std::vector<VariableLayout>* layout);

bool SameLayout(const std::vector<VariableLayout>& a, const std::vector<VariableLayout>& b);

}  // namespace gba

#endif  // GBA_TF_CC_KERNELS_LAYOUT_H_
