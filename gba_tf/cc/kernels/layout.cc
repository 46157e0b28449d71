#include "gba_tf/cc/kernels/layout.h"

#include <tuple>

#include "tensorflow/core/platform/errors.h"

namespace gba {

using ::tensorflow::DataType;

absl::Status ToValueType(DataType dtype, ValueType* value_type) {
  switch (dtype) {
    case tensorflow::DT_FLOAT:
      *value_type = ValueType::kFloat32;
      return absl::OkStatus();
    case tensorflow::DT_DOUBLE:
      *value_type = ValueType::kFloat64;
      return absl::OkStatus();
    case tensorflow::DT_HALF:
      *value_type = ValueType::kFloat16;
      return absl::OkStatus();
    case tensorflow::DT_BFLOAT16:
      *value_type = ValueType::kBFloat16;
      return absl::OkStatus();
    default:
      return tensorflow::errors::InvalidArgument(
          "Expected a gradient of type float32, float64, float16 or bfloat16, found ",
          tensorflow::DataTypeString(dtype));
  }
}

DataType ToDataType(ValueType value_type) {
  switch (value_type) {
    case ValueType::kFloat32:
      return tensorflow::DT_FLOAT;
    case ValueType::kFloat64:
      return tensorflow::DT_DOUBLE;
    case ValueType::kFloat16:
      return tensorflow::DT_HALF;
    case ValueType::kBFloat16:
      return tensorflow::DT_BFLOAT16;
  }
  return tensorflow::DT_INVALID;
}

absl::Status ToIdType(DataType dtype, IdType* id_type) {
  switch (dtype) {
    case tensorflow::DT_INT32:
      *id_type = IdType::kInt32;
      return absl::OkStatus();
    case tensorflow::DT_INT64:
      *id_type = IdType::kInt64;
      return absl::OkStatus();
    default:
      return tensorflow::errors::InvalidArgument("Expected row ids of type int32 or int64, found ",
                                                 tensorflow::DataTypeString(dtype));
  }
}

DataType ToDataType(IdType id_type) {
  return id_type == IdType::kInt32 ? tensorflow::DT_INT32 : tensorflow::DT_INT64;
}

absl::Status BufferLayoutFromAttributes(tensorflow::OpKernelConstruction* construction,
                                        std::vector<VariableLayout>* layout) {
  std::vector<DataType> value_types, id_types;
  std::vector<int64_t> num_elements, num_rows, row_widths;
  std::vector<bool> sparse, merge_rows;
  TF_RETURN_IF_ERROR(construction->GetAttr("value_types", &value_types));
  TF_RETURN_IF_ERROR(construction->GetAttr("id_types", &id_types));
  TF_RETURN_IF_ERROR(construction->GetAttr("num_elements", &num_elements));
  TF_RETURN_IF_ERROR(construction->GetAttr("num_rows", &num_rows));
  TF_RETURN_IF_ERROR(construction->GetAttr("row_widths", &row_widths));
  TF_RETURN_IF_ERROR(construction->GetAttr("sparse", &sparse));
  TF_RETURN_IF_ERROR(construction->GetAttr("merge_rows", &merge_rows));
  const size_t size = value_types.size();
  for (const size_t other : {id_types.size(), num_elements.size(), num_rows.size(),
                             row_widths.size(), sparse.size(), merge_rows.size()}) {
    if (other != size) {
      return tensorflow::errors::InvalidArgument(
          "Expected one entry per variable in every list attribute, found lists of ", size, " and ",
          other);
    }
  }
  layout->resize(size);
  for (size_t i = 0; i < size; ++i) {
    VariableLayout& variable = (*layout)[i];
    TF_RETURN_IF_ERROR(ToValueType(value_types[i], &variable.value_type));
    TF_RETURN_IF_ERROR(ToIdType(id_types[i], &variable.id_type));
    variable.sparse = sparse[i];
    variable.num_elements = sparse[i] ? 0 : num_elements[i];
    variable.num_rows = sparse[i] ? num_rows[i] : 0;
    variable.row_width = sparse[i] ? row_widths[i] : 0;
    variable.merge_rows = !sparse[i] || merge_rows[i];
  }
  return absl::OkStatus();
}

bool SameLayout(const std::vector<VariableLayout>& a, const std::vector<VariableLayout>& b) {
  const auto key = [](const VariableLayout& v) {
    return std::make_tuple(v.value_type, v.sparse, v.num_elements, v.num_rows, v.row_width,
                           v.id_type, v.merge_rows);
  };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [&key](const auto& x, const auto& y) { return key(x) == key(y); });
}

}  // namespace gba
