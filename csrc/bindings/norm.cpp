#include "weightsync/norm.hpp"

#include "bindings.hpp"

namespace py = pybind11;

namespace weightsync::bindings {

void bind_norm(py::module_& module) {
    module.def(
        "norm_rows",
        [](int dtype, float eps, std::int64_t num_rows, std::int64_t num_groups, std::int64_t width,
           std::int64_t row_stride, std::int64_t group_stride, std::uintptr_t input_ptr,
           std::uintptr_t weight_ptr, std::uintptr_t output_ptr, int num_threads) {
            check_num_threads(num_threads);
            if (input_ptr == 0 || weight_ptr == 0 || output_ptr == 0) {
                throw std::invalid_argument("normed rows: a pointer is null");
            }
            const NormedRows rows{static_cast<FloatType>(dtype),
                                  num_rows,
                                  num_groups,
                                  width,
                                  row_stride,
                                  group_stride,
                                  eps,
                                  pointer<const void>(input_ptr),
                                  pointer<const void>(weight_ptr),
                                  pointer<void>(output_ptr)};
            const py::gil_scoped_release released;
            norm_rows(rows, num_threads);
        },
        py::arg("dtype"), py::arg("eps"), py::arg("num_rows"), py::arg("num_groups"),
        py::arg("width"), py::arg("row_stride"), py::arg("group_stride"), py::arg("input_ptr"),
        py::arg("weight_ptr"), py::arg("output_ptr"), py::arg("num_threads"));
}

}  // namespace weightsync::bindings
