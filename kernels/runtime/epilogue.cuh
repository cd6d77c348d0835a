// The row code of the epilogue that EPILOGUE names: <EPILOGUE>_row.cuh.
#pragma once

#define QUOTED_HEADER(name) #name
#define ROW_HEADER_NAMED(epilogue) QUOTED_HEADER(epilogue##_row.cuh)
#define ROW_HEADER(epilogue) ROW_HEADER_NAMED(epilogue)
#include ROW_HEADER(EPILOGUE)
