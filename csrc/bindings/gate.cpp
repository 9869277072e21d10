#include "weightsync/gate.hpp"

#include "bindings.hpp"

namespace py = pybind11;

namespace weightsync::bindings {

void bind_gate(py::module_& module) {
    module.def(
        "gate_rows",
        [](int dtype, std::int64_t num_rows, std::int64_t width, std::int64_t row_stride,
           std::uintptr_t gate_up_ptr, std::uintptr_t output_ptr, int num_threads) {
            check_num_threads(num_threads);
            if (gate_up_ptr == 0 || output_ptr == 0) {
                throw std::invalid_argument("gated rows: a pointer is null");
            }
            const GatedRows rows{static_cast<FloatType>(dtype),
                                 num_rows,
                                 width,
                                 row_stride,
                                 pointer<const void>(gate_up_ptr),
                                 pointer<void>(output_ptr)};
            const py::gil_scoped_release released;
            gate_rows(rows, num_threads);
        },
        py::arg("dtype"), py::arg("num_rows"), py::arg("width"), py::arg("row_stride"),
        py::arg("gate_up_ptr"), py::arg("output_ptr"), py::arg("num_threads"));
}

}  // namespace weightsync::bindings
