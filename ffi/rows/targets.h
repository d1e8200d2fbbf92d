// The C symbols of a platform's library: a handler jaxsoft_NAME for each record of operations.h, the records as text,
// and the version of the FFI. One file of each library includes this, and exports the handlers at its end.
//
// A library may have handlers beside these, for which that file defines JAXSOFT_OTHER_OPERATIONS before: their text.
#pragma once

#include <string>

#include "specification.h"

// The version of the FFI's interface that the library was compiled against. Python reads it before it registers
// anything, as XLA disables a whole platform if one of its handlers was compiled against a newer version.
JAXSOFT_EXPORT int jaxsoft_ffi_api_major() { return XLA_FFI_API_MAJOR; }
JAXSOFT_EXPORT int jaxsoft_ffi_api_minor() { return XLA_FFI_API_MINOR; }

#ifndef JAXSOFT_OTHER_OPERATIONS
#define JAXSOFT_OTHER_OPERATIONS ""
#endif
JAXSOFT_EXPORT const char* jaxsoft_operations() {
  static const std::string text = jaxsoft::operations_as_text() + JAXSOFT_OTHER_OPERATIONS;
  return text.c_str();
}

// Exports jaxsoft_NAME, whose calls go to handle<Name::NAME>(Context, ffi::RemainingArgs, ffi::RemainingRets, Form).
#define JAXSOFT_EXPORT_TARGET(name, handle, Context)                  \
  JAXSOFT_EXPORT_HANDLER(jaxsoft_##name, handle<jaxsoft::Name::name>, \
                         xla::ffi::Ffi::Bind().Ctx<Context>().RemainingArgs().RemainingRets().Attrs<jaxsoft::Form>())
