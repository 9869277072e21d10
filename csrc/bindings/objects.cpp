#include "bindings.hpp"

namespace py = pybind11;

namespace weightsync::bindings {

// Compares references only: no object is asked anything.
void bind_objects(py::module_& module) {
    module.def(
        "same_objects",
        [](const py::list& left, const py::list& right) {
            const Py_ssize_t size = PyList_GET_SIZE(left.ptr());
            if (size != PyList_GET_SIZE(right.ptr())) return false;
            for (Py_ssize_t i = 0; i < size; ++i) {
                if (PyList_GET_ITEM(left.ptr(), i) != PyList_GET_ITEM(right.ptr(), i)) return false;
            }
            return true;
        },
        py::arg("left"), py::arg("right"));
}

}  // namespace weightsync::bindings
