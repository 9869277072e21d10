#include <cstdint>
#include <vector>

#include "bindings.hpp"

namespace py = pybind11;

namespace weightsync::bindings {
namespace {

// As much of the DLPack C exchange (dlpack.h 1.3, struct DLPackExchangeAPI) as is needed to ask
// where a tensor lies. A framework hands the struct out in a capsule named "dlpack_exchange_api".
struct DlTensor {
    void* data;
    std::int32_t device_type;
    std::int32_t device_id;
    std::int32_t num_dims;
    std::uint8_t type_code;
    std::uint8_t type_bits;
    std::uint16_t type_lanes;
    std::int64_t* shape;
    std::int64_t* strides;
    std::uint64_t byte_offset;
};

struct DlExchangeApi {
    std::uint32_t major;
    std::uint32_t minor;
    DlExchangeApi* previous;
    void* allocate;
    void* managed_from_object;
    void* managed_to_object;
    int (*tensor_from_object)(void* object, DlTensor* out);  // null: not offered
    void* current_stream;
};

constexpr std::uint32_t kDlMajor = 1;

const DlExchangeApi& exchange_of(const py::capsule& capsule) {
    const auto* api = static_cast<const DlExchangeApi*>(
        PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (api == nullptr) throw py::error_already_set();
    while (api != nullptr && api->major != kDlMajor) api = api->previous;
    if (api == nullptr || api->tensor_from_object == nullptr) {
        throw py::buffer_error("this framework does not say where a tensor lies");
    }
    return *api;
}

void append_state(const DlTensor& tensor, std::vector<std::int64_t>& words) {
    words.push_back(static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(tensor.data)));
    words.push_back(static_cast<std::int64_t>(tensor.byte_offset));
    words.push_back((static_cast<std::int64_t>(tensor.device_type) << 32) | tensor.device_id);
    words.push_back((static_cast<std::int64_t>(tensor.type_code) << 40) |
                    (static_cast<std::int64_t>(tensor.type_bits) << 32) |
                    (static_cast<std::int64_t>(tensor.type_lanes) << 16) | tensor.num_dims);
    for (std::int32_t d = 0; d < tensor.num_dims; ++d) {
        words.push_back(tensor.shape[d]);
        words.push_back(tensor.strides == nullptr ? -1 : tensor.strides[d]);
    }
}

// Pointer, device, dtype, shape and strides of each tensor, as bytes that are equal if all of these
// are. Raises what the framework raises for a tensor that it cannot describe.
py::bytes tensor_state(const py::capsule& capsule, const py::list& tensors) {
    const DlExchangeApi& api = exchange_of(capsule);
    std::vector<std::int64_t> words;
    words.reserve(static_cast<std::size_t>(PyList_GET_SIZE(tensors.ptr())) * 8);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors.ptr()); ++i) {
        DlTensor tensor{};
        if (api.tensor_from_object(PyList_GET_ITEM(tensors.ptr(), i), &tensor) != 0) {
            throw py::error_already_set();
        }
        append_state(tensor, words);
    }
    return {reinterpret_cast<const char*>(words.data()), words.size() * sizeof(std::int64_t)};
}

// Compares references only: no object is asked anything.
bool same_objects(const py::list& left, const py::list& right) {
    const Py_ssize_t size = PyList_GET_SIZE(left.ptr());
    if (size != PyList_GET_SIZE(right.ptr())) return false;
    for (Py_ssize_t i = 0; i < size; ++i) {
        if (PyList_GET_ITEM(left.ptr(), i) != PyList_GET_ITEM(right.ptr(), i)) return false;
    }
    return true;
}

}  // namespace

void bind_objects(py::module_& module) {
    module.def("same_objects", &same_objects, py::arg("left"), py::arg("right"));
    module.def("tensor_state", &tensor_state, py::arg("exchange"), py::arg("tensors"));
}

}  // namespace weightsync::bindings
